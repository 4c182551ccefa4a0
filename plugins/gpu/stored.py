# SPDX-License-Identifier: Apache-2.0
"""Weights as they are stored, read by GPU kernels; shared by the ops that multiply by them.

The formats are those of ``plugins/formats``. A kernel loads codes as 32-bit words, so that one thread moves 16 bytes at
once, and turns two codes at a time into float16 with shifts and masks alone, since only some architectures convert
8-bit and 4-bit floats themselves:

- E4M3 and float16 have their fields in the same order, and subnormals work alike, so a code whose bits are moved to
  their places is its value times 2^-8.
- E2M1 likewise; there it is 2^-14.

That is exact, and so is an E2M1 value times its block's scale: six significant bits at most. The powers of two and a
tensor's own scale are multiplied onto the float32 sums (:data:`VECTOR_FACTORS`, :data:`TILE_FACTORS`). NaN codes do not
occur: :mod:`nemo_build.plugins.codecs` writes none, and refuses them in scales.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nemo_build.plugins.gpu.kernel import Dim, Tensor

VECTOR_FACTORS = {"plain": 1.0, "fp8": 2.0**8, "nvfp4": 2.0**22}
"""What sums of :func:`add_products` lack, by the weight's format."""

TILE_FACTORS = {"plain": 1.0, "fp8": 2.0**8, "nvfp4": 2.0**7}
"""What the values of :func:`load_tile` lack, by format."""

BLOCK = tl.constexpr(16)  # of NVFP4


def group_size(weight_format: str, dtype: str) -> int:
    """Values of :func:`load_values`' last axis: those of a word of codes, or of 16 bytes of numbers of ``dtype``."""
    return {"fp8": 4, "nvfp4": 8}.get(weight_format, 4 if dtype == "float32" else 8)


def stored_tensors(
    name: str, weight_format: str, dtype: str, lead: tuple[Dim, ...], columns: int, tensors: int
) -> list[Tensor]:
    """The tensors of a weight ``[*lead, columns]`` as kernels take them; 8-bit floats are bytes, scales of tensors 1-D.

    Args:
        name: Prefix of the names ``NAME``, ``NAME_scale``, ``NAME_scale_2``.
        weight_format: How it is stored.
        dtype: Element type, where it is stored plainly.
        lead: All axes but the last.
        columns: The last axis.
        tensors: How many tensors with a scale of their own are stacked in it.
    """
    if weight_format == "plain":
        return [Tensor(name, dtype, (*lead, columns))]
    if columns % BLOCK.value:
        raise ValueError(f"`{name}` has {columns} columns; {weight_format} kernels want a multiple of 16.")
    if weight_format == "fp8":
        return [Tensor(name, "uint8", (*lead, columns)), Tensor(f"{name}_scale", "float32", (tensors,))]
    return [
        Tensor(name, "uint8", (*lead, columns // 2)),
        Tensor(f"{name}_scale", "uint8", (*lead, columns // BLOCK.value)),
        Tensor(f"{name}_scale_2", "float32", (tensors,)),
    ]


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
        codes: The stored tensor ``[..., K]``, or ``[..., K / 2]`` for nvfp4.
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

    Args as in :func:`load_values`; ``scales`` are nvfp4's, bytes of E4M3 ``[..., K / 16]``.
    """
    R: tl.constexpr = row.shape[0]
    values = load_values(codes, row, there, k, K, BLOCK_K, FORMAT, GROUP)
    if FORMAT == "nvfp4":
        block = k // BLOCK + tl.arange(0, BLOCK_K // BLOCK)
        mask = there[:, None] & (block < K // BLOCK)[None, :]
        scale = e4m3_of_bytes(tl.load(scales + row[:, None] * (K // BLOCK) + block[None, :], mask, 0))
        scale = (scale * 32768.0)[:, :, None]  # the largest power of two by which 448 still fits
        values = tl.reshape(values, (R, BLOCK_K // BLOCK, BLOCK)) * scale
    return tl.reshape(values, (R, BLOCK_K))


@triton.jit
def load_group_scales(scales, row, there, k, K: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr):
    """nvfp4's block scales times 2^-8, float32 ``[R, BLOCK_K / GROUP]``, for each group of :func:`load_values`."""
    block = (k + tl.arange(0, BLOCK_K // GROUP) * GROUP) // BLOCK
    mask = there[:, None] & (block < K // BLOCK)[None, :]
    code = tl.load(scales + row[:, None] * (K // BLOCK) + block[None, :], mask, 0)
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
        x: The tokens ``[M, K]``, or ``[M, K / 2]`` for nvfp4.
        x_scales: Block scales ``[M, K / 16]`` of nvfp4.
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
        code = tl.load(x + token[:, None] * K + column, inside, 0)
        return e4m3_of_bytes(code).to(tl.float32) * 256.0
    else:
        byte = tl.load(x + token[:, None] * (K // 2) + column // 2, inside, 0)
        nibble = (byte >> (column % 2 * 4).to(tl.uint8)).to(tl.uint16)
        value = (((nibble & 8) << 12) | ((nibble & 7) << 9)).to(tl.float16, bitcast=True)
        scale = tl.load(x_scales + token[:, None] * (K // BLOCK) + column // BLOCK, inside, 0)
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
