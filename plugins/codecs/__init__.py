# SPDX-License-Identifier: Apache-2.0
"""Codecs of quantized weights: what checkpoints in ModelOpt's layout hold, byte for byte.

:mod:`.nvfp4` is the 4-bit format with a scale for each 16 values, :mod:`.fp8` the 8-bit one with a scale for
each tensor. Each has a NumPy reference; :mod:`.native` does the same work in C++ where it was built.
"""
