# SPDX-License-Identifier: Apache-2.0
"""Weights as they are stored, read by GPU kernels; shared by the ops that multiply by them.

The formats are those of ``plugins/formats``. Codes and block scales are the very bytes of the checkpoint, row after
row without gaps, handed over as a flat tensor of 32-bit words (:func:`as_words`), so that a backend need not know types
of 8 bits. Weights that are stacked have no gaps either: their bytes are stacked before they are made words.

A kernel loads codes as words, so that one thread moves 16 bytes at once, and turns two codes at a time into float16
with shifts and masks alone, since only some architectures convert 8-bit and 4-bit floats themselves:

- E4M3 and float16 have their fields in the same order, and subnormals work alike, so a code whose bits are moved to
  their places is its value times 2^-8.
- E2M1 likewise; there it is 2^-14.

That is exact, and so is an E2M1 value times its block's scale: six significant bits at most. The powers of two and a
tensor's own scale are multiplied onto the float32 sums (:data:`VECTOR_FACTORS`, :data:`TILE_FACTORS`). NaN codes do not
occur: :mod:`nemo_build.plugins.codecs` writes none, and refuses them in scales.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray

from nemo_build.plugins.gpu.kernel import Dim, Tensor, ceil_div

VECTOR_FACTORS = {"plain": 1.0, "fp8": 2.0**8, "nvfp4": 2.0**22}
"""What sums of :func:`add_products` lack, by the weight's format."""

TILE_FACTORS = {"plain": 1.0, "fp8": 2.0**8, "nvfp4": 2.0**7}
"""What the values of :func:`load_tile` lack, by format."""

BLOCK = tl.constexpr(16)  # of NVFP4


def group_size(weight_format: str, dtype: str) -> int:
    """Values of :func:`load_values`' last axis: those of a word of codes, or of 16 bytes of numbers of ``dtype``."""
    return {"fp8": 4, "nvfp4": 8}.get(weight_format, 4 if dtype == "float32" else 8)


def as_words(stored: NDArray[Any]) -> NDArray[np.int32]:
    """The bytes of an array as int32 ``[ceil(bytes / 4)]``; the last word is filled up with zeros.

    Each word has four bytes, the first in its lowest bits.
    """
    data = np.ascontiguousarray(stored).reshape(-1).view(np.uint8)
    return np.pad(data, (0, -data.size % 4)).view(np.dtype("<i4"))


def stored_tensors(
    name: str, weight_format: str, dtype: str, lead: tuple[int, ...], columns: int, tensors: int
) -> list[Tensor]:
    """The tensors of a weight ``[*lead, columns]`` as kernels take them; scales of whole tensors are 1-D.

    Args:
        name: Prefix of the names ``NAME``, ``NAME_scale``, ``NAME_scale_2``.
        weight_format: How it is stored.
        dtype: Element type, where it is stored plainly.
        lead: All axes but the last.
        columns: The last axis.
        tensors: How many tensors with a scale of their own are stacked in it.

    Raises:
        ValueError: ``columns`` is not a multiple of 16 and the format has codes.
    """
    if weight_format == "plain":
        return [Tensor(name, dtype, (*lead, columns))]
    _check_columns(name, weight_format, columns)
    rows = math.prod(lead)

    def words(bytes_per_row: int) -> tuple[int]:
        return (ceil_div(rows * bytes_per_row, 4),)

    if weight_format == "fp8":
        return [Tensor(name, "int32", words(columns)), Tensor(f"{name}_scale", "float32", (tensors,))]
    return [
        Tensor(name, "int32", words(columns // 2)),
        Tensor(f"{name}_scale", "int32", words(columns // BLOCK.value)),
        Tensor(f"{name}_scale_2", "float32", (tensors,)),
    ]


def rounded_tensors(activation_format: str, lead: tuple[Dim, ...], columns: int) -> list[Tensor]:
    """``codes``, and for nvfp4 block ``scales``, of activations ``[*lead, columns]`` that a kernel rounds.

    As weights they are bytes without gaps in words. The shape only says how many words are enough: the last axis has
    those of a row, rounded up, so that the others may be sizes.

    Raises:
        ValueError: ``columns`` is not a multiple of 16.
    """
    _check_columns("x", activation_format, columns)
    if activation_format == "fp8":
        return [Tensor("codes", "int32", (*lead, columns // 4))]
    scales = Tensor("scales", "int32", (*lead, ceil_div(columns // BLOCK.value, 4)))
    return [Tensor("codes", "int32", (*lead, columns // 8)), scales]


def _check_columns(name: str, form: str, columns: int) -> None:
    if columns % BLOCK.value:
        raise ValueError(f"`{name}` has {columns} columns; {form} kernels want a multiple of 16.")


@triton.jit
def as_bytes(words):
    """A pointer to words as one to bytes."""
    return words.to(tl.pointer_type(tl.uint8), bitcast=True)


@triton.jit
def load_values(
    codes,
    row,
    there,
    k,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Values ``[R, BLOCK_K / GROUP, GROUP]`` of some rows from column ``k`` on, times a power of two; zero outside.

    Args:
        codes: The stored tensor: numbers ``[..., K]``, or words of codes.
        row: int64 ``[R]``, counted over all axes but the last.
        there: bool ``[R]``.
        k: First column, a multiple of 16.
        K: Columns of the weight.
        BLOCK_K: Columns to load.
        FORMAT: How it is stored.
        GROUP: See :func:`group_size`.
    """
    if FORMAT == "plain":
        column = k + tl.arange(0, BLOCK_K // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        mask = there[:, None, None] & (column < K)[None]
        return tl.load(codes + row[:, None, None] * K + column[None], mask, 0.0)
    else:
        WORDS: tl.constexpr = K // GROUP
        column = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
        mask = there[:, None] & (column < WORDS)[None, :]
        words = codes.to(tl.pointer_type(tl.uint32), bitcast=True)
        word = tl.load(words + row[:, None] * WORDS + column[None, :], mask, 0)
        if FORMAT == "fp8":
            return _e4m3_of_words(word)
        else:
            return _e2m1_of_words(word)


@triton.jit
def _e4m3_of_words(word):
    """E4M3 times 2^-8 ``[R, W, 4]`` of four codes a word ``[R, W]``."""
    even = ((word << 8) & 0x80008000) | ((word << 7) & 0x3F803F80)  # values 0 and 2
    odd = (word & 0x80008000) | ((word >> 1) & 0x3F803F80)
    halves = _halves(tl.join(even, odd))
    return tl.reshape(tl.permute(halves, (0, 1, 3, 2)), (word.shape[0], word.shape[1], 4))


@triton.jit
def _e2m1_of_words(word):
    """E2M1 times 2^-14 ``[R, W, 8]`` of eight codes a word ``[R, W]``, the lowest first."""
    p0 = ((word << 12) & 0x80008000) | ((word << 9) & 0x0E000E00)  # values 0 and 4
    p1 = ((word << 8) & 0x80008000) | ((word << 5) & 0x0E000E00)
    p2 = ((word << 4) & 0x80008000) | ((word << 1) & 0x0E000E00)
    p3 = (word & 0x80008000) | ((word >> 3) & 0x0E000E00)
    halves = _halves(tl.join(tl.join(p0, p2), tl.join(p1, p3)))
    return tl.reshape(tl.permute(halves, (0, 1, 4, 2, 3)), (word.shape[0], word.shape[1], 8))


@triton.jit
def _halves(pair):
    """The lower and the upper float16 of each word, along a new last axis."""
    low = pair.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def e4m3_of_bytes(code):
    """E4M3 times 2^-8 as float16, of uint8 codes."""
    wide = code.to(tl.uint16)
    return (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def load_tile(
    codes,
    scales,
    row,
    there,
    k,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Values ``[R, BLOCK_K]`` with their block's scale, for a dot product; see :data:`TILE_FACTORS`.

    Args as in :func:`load_values`; ``scales`` are nvfp4's, words of E4M3 ``[..., K / 16]``.
    """
    R: tl.constexpr = row.shape[0]
    values = load_values(codes, row, there, k, K, BLOCK_K, FORMAT, GROUP)
    if FORMAT == "nvfp4":
        block = k // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
        mask = there[:, None] & (block < K // BLOCK)[None, :]
        scale = e4m3_of_bytes(
            tl.load(as_bytes(scales) + row[:, None] * (K // BLOCK) + block[None, :], mask, 0)
        )
        scale = (scale * 32768.0)[:, :, None]  # the largest power of two by which 448 still fits
        values = tl.reshape(values, (R, BLOCK_K // BLOCK, BLOCK)) * scale
    return tl.reshape(values, (R, BLOCK_K))


@triton.jit
def load_group_scales(scales, row, there, k, K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """nvfp4's block scales times 2^-8, float32 ``[R, BLOCK_K / GROUP]``, for each group of :func:`load_values`."""
    block = (k + tl.arange(0, BLOCK_K // GROUP) * GROUP) // BLOCK
    mask = there[:, None] & (block < K // BLOCK)[None, :]
    code = tl.load(as_bytes(scales) + row[:, None] * (K // BLOCK) + block[None, :], mask, 0)
    return e4m3_of_bytes(code).to(tl.float32)


@triton.jit
def load_vector(
    x,
    x_scales,
    token,
    active,
    k,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Values of one token, float32 ``[BLOCK_K / GROUP, GROUP]``, without the scale of the whole.

    They are few, so each is decoded by itself: that leaves them in two dimensions and in any order of threads, and it
    is they that are moved to where the weights are, not the other way round.

    Args:
        x: The tokens ``[M, K]``: numbers, or words of codes.
        x_scales: Words of block scales ``[M, K / 16]`` of nvfp4.
        token: Which one, int64 ``[1]``.
        active: Whether there is such a token, bool ``[1]``.
        k, K, BLOCK_K, GROUP: As in :func:`load_values`.
        FORMAT: How ``x`` is stored.
    """
    column = k + tl.arange(0, BLOCK_K // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = active[:, None] & (column < K)
    if FORMAT == "plain":
        return tl.load(x + token[:, None] * K + column, inside, 0.0).to(tl.float32)
    elif FORMAT == "fp8":
        code = tl.load(as_bytes(x) + token[:, None] * K + column, inside, 0)
        return e4m3_of_bytes(code).to(tl.float32) * 256.0
    else:
        byte = tl.load(as_bytes(x) + token[:, None] * (K // 2) + column // 2, inside, 0)
        nibble = (byte >> (column % 2 * 4).to(tl.uint8)).to(tl.uint16)
        value = (((nibble & 8) << 12) | ((nibble & 7) << 9)).to(tl.float16, bitcast=True)
        scale = tl.load(as_bytes(x_scales) + token[:, None] * (K // BLOCK) + column // BLOCK, inside, 0)
        return value.to(tl.float32) * e4m3_of_bytes(scale).to(tl.float32) * 4194304.0


@triton.jit
def add_products(sums, values, scales, vector):
    """``sums`` plus the products of a weight's values with one token, group by group.

    Added up along the last axis and multiplied by :data:`VECTOR_FACTORS`, the sums are the matrix product.

    Args:
        sums: float32 ``[R, W]``.
        values: ``[R, W, GROUP]`` from :func:`load_values`.
        scales: ``[R, W]`` from :func:`load_group_scales`, or None.
        vector: ``[W, GROUP]`` from :func:`load_vector`.
    """
    products = tl.sum(values.to(tl.float32) * vector[None], 2)
    if scales is not None:
        products = products * scales
    return sums + products
