# SPDX-License-Identifier: Apache-2.0
"""Quantization: an unquantized checkpoint becomes one in ModelOpt's layout."""
