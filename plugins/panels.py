# SPDX-License-Identifier: Apache-2.0
"""Weights in panels, the layout that the CPU kernels multiply; ``plugins/native/panels.h`` describes it.

The table here and the one in ``panels.cc`` are the same; tests compare them, and the packing, with NumPy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins import native

ROWS = 16
"""Output rows of a panel."""

DEPTH = 64
"""Columns of a superblock."""

CHUNK = 64
"""Bytes of a chunk: one 32-bit word of each row."""


@dataclass(frozen=True)
class PanelFormat:
    """How a panel's weights are encoded.

    Attributes:
        name: Name of the format.
        number: Its number in the native library.
        code_bits: Bits of a code.
        block: Columns that share a block scale; 0 for none.
        scale_bytes: Bytes of a block scale.
    """

    name: str
    number: int
    code_bits: int
    block: int = 0
    scale_bytes: int = 0

    def code_bytes(self, columns: int) -> int:
        """Bytes of a stored row's codes."""
        return -(-columns * self.code_bits // 8)

    def row_scales(self, columns: int) -> int:
        """Bytes of a stored row's block scales."""
        return -(-columns // self.block) * self.scale_bytes if self.block else 0

    def panel_bytes(self, columns: int) -> int:
        """Bytes of a panel."""
        chunks = self.code_bits * 2 + (1 if self.block else 0)
        return -(-columns // DEPTH) * chunks * CHUNK

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight ``[rows, columns]`` in panels."""
        return -(-rows // ROWS) * self.panel_bytes(columns)


_ALL = (
    PanelFormat("nvfp4", 0, 4, 16, 1),
    PanelFormat("int4", 1, 4, 32, 2),
    PanelFormat("fp8", 2, 8),
    PanelFormat("int8", 3, 8, 32, 2),
    PanelFormat("bf16", 4, 16),
    PanelFormat("f16", 5, 16),
    PanelFormat("f32", 6, 32),
)

FORMATS: Mapping[str, PanelFormat] = {f.name: f for f in _ALL}
"""All formats by name."""


def pack(
    form: PanelFormat, columns: int, codes: NDArray[Any], scales: NDArray[Any] | None
) -> NDArray[np.uint8]:
    """Lay rows of a weight out in panels.

    Args:
        form: The format of the rows.
        columns: Weights in a row.
        codes: uint8 ``[N, code_bytes]``, contiguous.
        scales: uint8 ``[N, row_scales]``, contiguous, or None for a format without.

    Returns:
        uint8 ``[ceil(N/16) * panel_bytes]``; rows past N are zeros.
    """
    rows = len(codes)
    assert codes.shape[1] == form.code_bytes(columns), "codes do not have the row length of their format"
    assert (0 if scales is None else scales.shape[1]) == form.row_scales(columns), "nor do scales"
    out = np.empty(form.nbytes(rows, columns), np.uint8)
    native.load("plain").nemo_pack_panels(
        ctypes.c_int(form.number),
        ctypes.c_int64(rows),
        ctypes.c_int64(columns),
        ctypes.c_void_p(codes.ctypes.data),
        ctypes.c_void_p(None if scales is None else scales.ctypes.data),
        ctypes.c_int64(0),
        ctypes.c_int64(-(-rows // ROWS)),
        ctypes.c_void_p(out.ctypes.data),
    )
    return out
