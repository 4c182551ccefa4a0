# SPDX-License-Identifier: Apache-2.0
"""The speculators, one module each; its name is what ``--speculate`` takes.

A module defines ``KIND``, a :class:`~nemo_build.runtime.speculation.kind.SpeculatorKind`.
"""
