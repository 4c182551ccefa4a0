# SPDX-License-Identifier: Apache-2.0
"""``BlockLinear`` on a GPU; see schema.py. The weight is read as stored, ``plugins/gpu/stored.py``.

- ``vector_T``: up to T tokens. A program multiplies a few rows of the weight with every token in float32; a weight is
  read and decoded once.
- ``tile_T``: any number of tokens, T a program, by dot products. ``tile_16`` reads each weight once for up to 16
  tokens, ``tile_128`` is for prompts. Codes of E4M3, and of E2M1 times their block's scale, are exact in the operands.
- ``round``: where activations are rounded, a node of its own before the others, which then read codes.
- ``codes_T``: as ``tile_T``, on architectures whose tensor cores multiply codes of both sides.

Within a launch, what a token gets does not depend on the others; two launches add up in different orders. Rows at or
past ``lengths`` are not computed. The portable op's scalars are tensors of one element here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from nemo_build.plugins.block_linear.gpu_rounding import round_fp8, round_nvfp4
from nemo_build.plugins.gpu.kernel import Kernel, Tensor, ceil_div
from nemo_build.plugins.gpu.stored import (
    BLOCK,
    TILE_FACTORS,
    VECTOR_FACTORS,
    add_products,
    group_size,
    load_group_scales,
    load_tile,
    load_values,
    load_vector,
    stored_tensors,
)
from nemo_build.plugins.gpu.tokens import is_token


@triton.jit
def vector(
    x,
    weight,
    lengths,
    weight_scale,
    weight_scale_2,
    input_scale,
    x_scale,
    batch,
    steps,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``BLOCK_N`` outputs of every token, of which there are ``BLOCK_TOKENS`` (1 or 4) at most."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < N
    at = row.to(tl.int64)
    sums_0 = tl.zeros((BLOCK_N, BLOCK_K // GROUP), tl.float32)
    sums_1 = sums_0
    sums_2 = sums_0
    sums_3 = sums_0
    first = tl.arange(0, 1)  # a block of one token
    on_0 = is_token(first, lengths, batch, steps)
    on_1 = is_token(first + 1, lengths, batch, steps)
    on_2 = is_token(first + 2, lengths, batch, steps)
    on_3 = is_token(first + 3, lengths, batch, steps)
    for k in range(0, K, BLOCK_K):
        values = load_values(weight, at, there, k, K, BLOCK_K, FORMAT, GROUP)
        scales = None
        if FORMAT == "nvfp4":
            scales = load_group_scales(weight_scale, at, there, k, K, BLOCK_K, GROUP)
        sums_0 = _add(sums_0, values, scales, x, x_scale, 0, on_0, k, K, BLOCK_K, X_FORMAT, GROUP)
        if BLOCK_TOKENS == 4:
            sums_1 = _add(sums_1, values, scales, x, x_scale, 1, on_1, k, K, BLOCK_K, X_FORMAT, GROUP)
            sums_2 = _add(sums_2, values, scales, x, x_scale, 2, on_2, k, K, BLOCK_K, X_FORMAT, GROUP)
            sums_3 = _add(sums_3, values, scales, x, x_scale, 3, on_3, k, K, BLOCK_K, X_FORMAT, GROUP)
    factor = _factor(weight_scale, weight_scale_2, input_scale, FACTOR, FORMAT)
    _store_row(y, sums_0, factor, 0, row, there & on_0, N)
    if BLOCK_TOKENS == 4:
        _store_row(y, sums_1, factor, 1, row, there & on_1, N)
        _store_row(y, sums_2, factor, 2, row, there & on_2, N)
        _store_row(y, sums_3, factor, 3, row, there & on_3, N)


@triton.jit
def _add(
    sums,
    values,
    scales,
    x,
    x_scale,
    token: tl.constexpr,
    on,
    k,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Sums of a token, with the products of a tile of weights (values, scales)."""
    at = token + tl.arange(0, 1).to(tl.int64)
    return add_products(sums, values, scales, load_vector(x, x_scale, at, on, k, K, BLOCK_K, X_FORMAT, GROUP))


@triton.jit
def _store_row(y, sums, factor, token: tl.constexpr, row, there, N: tl.constexpr):
    tl.store(y + token * N + row, (tl.sum(sums, 1) * factor).to(y.dtype.element_ty), there)


@triton.jit
def _factor(weight_scale, weight_scale_2, input_scale, FACTOR: tl.constexpr, FORMAT: tl.constexpr):
    """What all sums are multiplied by: the tensors' scales, and the powers of two that decoding left out."""
    factor = tl.full((), FACTOR, tl.float32)
    if FORMAT == "fp8":
        factor *= tl.load(weight_scale)
    if FORMAT == "nvfp4":
        factor *= tl.load(weight_scale_2)
    if input_scale is not None:
        factor *= tl.load(input_scale)
    return factor


@triton.jit
def tile(
    x,
    weight,
    lengths,
    weight_scale,
    weight_scale_2,
    input_scale,
    x_scale,
    batch,
    steps,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    X_FORMAT: tl.constexpr,
    FACTOR: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``BLOCK_N`` outputs of ``BLOCK_TOKENS`` tokens. Weights are the left operand, which may stay in registers."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    active = is_token(token, lengths, batch, steps)
    if tl.max(active.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < N
    row, token = row.to(tl.int64), token.to(tl.int64)
    sums = tl.zeros((BLOCK_N, BLOCK_TOKENS), tl.float32)
    for k in range(0, K, BLOCK_K):
        left = load_tile(weight, weight_scale, row, there, k, K, BLOCK_K, FORMAT, GROUP)
        right = load_tile(x, x_scale, token, active, k, K, BLOCK_K, X_FORMAT, GROUP)
        sums = tl.dot(left.to(tl.float32).to(right.dtype), tl.trans(right), sums, input_precision="ieee")
    factor = _factor(weight_scale, weight_scale_2, input_scale, FACTOR, FORMAT)
    _store_tile(y, sums * factor, row, there, token, active, N)


@triton.jit
def _store_tile(y, sums, row, there, token, active, N: tl.constexpr):
    """Store sums ``[rows, tokens]``."""
    at = token[None, :] * N + row[:, None]
    tl.store(y + at, sums.to(y.dtype.element_ty), there[:, None] & active[None, :])


@triton.jit
def codes(
    x,
    weight,
    lengths,
    weight_scale,
    weight_scale_2,
    input_scale,
    x_scale,
    batch,
    steps,
    y,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As :func:`tile`, with codes as operands of the tensor cores: two of E4M3, or two of E2M1 with block scales."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    active = is_token(token, lengths, batch, steps)
    if tl.max(active.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < N
    row, token = row.to(tl.int64), token.to(tl.int64)
    sums = tl.zeros((BLOCK_N, BLOCK_TOKENS), tl.float32)
    for k in range(0, K, BLOCK_K):
        if FORMAT == "fp8":
            left = _bytes(weight, row, there, k, K, BLOCK_K).to(tl.float8e4nv, bitcast=True)
            right = _bytes(x, token, active, k, K, BLOCK_K).to(tl.float8e4nv, bitcast=True)
            # Hopper adds up fewer bits within a tile of columns; tiles are added in float32.
            sums = tl.dot(left, tl.trans(right), sums, max_num_imprecise_acc=BLOCK_K)
        else:
            left = _bytes(weight, row, there, k // 2, K // 2, BLOCK_K // 2)
            right = _bytes(x, token, active, k // 2, K // 2, BLOCK_K // 2)
            left_scale = _bytes(weight_scale, row, there, k // BLOCK, K // BLOCK, BLOCK_K // BLOCK)
            right_scale = _bytes(x_scale, token, active, k // BLOCK, K // BLOCK, BLOCK_K // BLOCK)
            left_scale = left_scale.to(tl.float8e4nv, bitcast=True)
            right_scale = right_scale.to(tl.float8e4nv, bitcast=True)
            sums = tl.dot_scaled(left, left_scale, "e2m1", tl.trans(right), right_scale, "e2m1", sums)
    factor = _factor(weight_scale, weight_scale_2, input_scale, 1.0, FORMAT)
    _store_tile(y, sums * factor, row, there, token, active, N)


@triton.jit
def _bytes(tensor, row, there, column, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Bytes ``[R, BLOCK_WIDTH]`` of some rows of ``[..., WIDTH]`` from a column on; zero outside."""
    at = column + tl.arange(0, BLOCK_WIDTH)
    return tl.load(tensor + row[:, None] * WIDTH + at[None, :], there[:, None] & (at < WIDTH)[None, :], 0)


_TYPES = ("float32", "float16", "bfloat16")


def kernels(attributes: Mapping[str, Any], dims: Mapping[str, int]) -> list[Kernel]:
    """All launches for a weight, for each type of activations.

    A plain weight is of the activations' type: a build converts it. Where activations are rounded, ``round`` comes
    first and the others read its codes.

    Args:
        attributes: ``weight_format`` and ``activation_format``.
        dims: ``rows`` (N) and ``columns`` (K) of the weight; ``lengths``, 0 for a node that has no such input.

    Raises:
        ValueError: K is not a multiple of 16 and the format has codes, or no kernel multiplies the two formats.
    """
    form, rounded = attributes.get("weight_format", "plain"), attributes.get("activation_format", "none")
    if rounded not in ("none", form):
        raise ValueError(f"No kernel multiplies a weight in {form} by activations in {rounded}.")
    lengths = bool(dims["lengths"])
    made = (_Linear(dims["rows"], dims["columns"], form, rounded, dtype, lengths) for dtype in _TYPES)
    return [kernel for linear in made for kernel in linear.kernels()]


@dataclass(frozen=True)
class _Linear:
    """A projection, and what its kernels are called with."""

    rows: int
    columns: int
    form: str
    rounded: str
    dtype: str
    lengths: bool

    def kernels(self) -> list[Kernel]:
        made = [self.vector(1), self.vector(4), self.tile(16), self.tile(128)]
        return made if self.rounded == "none" else [self.round(), *made, self.codes(16), self.codes(128)]

    def vector(self, tokens: int) -> Kernel:
        """For ``tokens`` at most. The larger a tile, the more bytes are on their way; all of it stays in registers."""
        rows, columns = (8, 1024) if tokens == 1 else (8 if self.form == "plain" else 4, 512)
        constexprs = self._formats() | {"FACTOR": VECTOR_FACTORS[self.form]} | _blocks(tokens, rows, columns)
        grid = _grid(None, self.rows, rows)
        return self._multiply(f"vector_{tokens}", vector, constexprs, grid, per_token=True)

    def tile(self, tokens: int) -> Kernel:
        """For any number of tokens; ``tokens`` of them a program, or fewer for float32, whose tiles are larger."""
        wide = self.dtype == "float32" and self.rounded == "none"
        few = tokens == 16
        block_tokens, block_n = min(tokens, 64 if wide else 128), 64 if few or wide else 128
        constexprs = self._formats() | _blocks(block_tokens, block_n, 32 if wide else 64)
        constexprs["FACTOR"] = TILE_FACTORS[self.form] * TILE_FACTORS[constexprs["X_FORMAT"]]
        grid = _grid(block_tokens, self.rows, block_n)
        warps = 4 if few or wide else 8
        return self._multiply(
            f"tile_{tokens}", tile, constexprs, grid, per_token=few, num_warps=warps, num_stages=3
        )

    def codes(self, tokens: int) -> Kernel:
        """As :meth:`tile`, on tensor cores that multiply codes."""
        constexprs = {"FORMAT": self.form} | _blocks(tokens, 128, 128)
        grid = _grid(tokens, self.rows, 128)
        launch = {"num_warps": 4 if tokens == 16 else 8, "num_stages": 3}
        launch |= {"fp8": {"least_sm": 89, "least_ptx": 84}, "nvfp4": {"least_sm": 100, "least_ptx": 88}}[
            self.form
        ]
        return self._multiply(f"codes_{tokens}", codes, constexprs, grid, **launch)

    def round(self) -> Kernel:
        """Codes of the activations, and their block scales where the format has some."""
        function, names, block = {
            "fp8": (round_fp8, ("codes",), {"BLOCK_K": 1024}),
            "nvfp4": (round_nvfp4, ("codes", "scales"), {"BLOCKS": 64}),
        }[self.rounded]
        return Kernel(
            op="BlockLinear",
            name="round",
            types=self._types,
            function=function,
            inputs=(self._plain_x, *self._lengths, Tensor("input_scale", "float32", (1,))),
            sizes=("batch", "steps"),
            outputs=tuple(replace(t, name=n) for t, n in zip(self._rounded_x, names, strict=True)),
            constexprs={"K": self.columns, **block, **({} if self.lengths else {"lengths": None})},
            grid=lambda sizes: (sizes["batch"] * sizes["steps"], ceil_div(self.columns, 1024), 1),
            per_token=True,
        )

    def _multiply(
        self, name: str, function: Any, constexprs: dict[str, Any], grid: Any, **launch: Any
    ) -> Kernel:
        """A kernel that multiplies ``x``, rounded before or as it is."""
        weight, *scales = stored_tensors("weight", self.form, self.dtype, (self.rows,), self.columns, 1)
        x, *x_scale = [self._plain_x] if self.rounded == "none" else self._rounded_x
        unit = [] if self.rounded == "none" else [Tensor("input_scale", "float32", (1,))]
        inputs = (x, weight, *self._lengths, *scales, *unit, *x_scale)
        optional = ("lengths", "weight_scale", "weight_scale_2", "input_scale", "x_scale")
        absent = dict.fromkeys(set(optional) - {t.name for t in inputs})
        return Kernel(
            op="BlockLinear",
            name=name,
            types=self._types,
            function=function,
            inputs=inputs,
            sizes=("batch", "steps"),
            outputs=(Tensor("y", self.dtype, ("batch", "steps", self.rows)),),
            constexprs={"N": self.rows, "K": self.columns, **constexprs, **absent},
            grid=grid,
            **launch,
        )

    def _formats(self) -> dict[str, Any]:
        x_format = "plain" if self.rounded == "none" else self.rounded
        return {"FORMAT": self.form, "X_FORMAT": x_format, "GROUP": group_size(self.form, self.dtype)}

    @property
    def _plain_x(self) -> Tensor:
        return Tensor("x", self.dtype, ("batch", "steps", self.columns))

    @property
    def _rounded_x(self) -> list[Tensor]:
        """Codes, and block scales of nvfp4; the scale of the whole is ``input_scale``."""
        return stored_tensors("x", self.rounded, "", ("batch", "steps"), self.columns, 1)[:-1]

    @property
    def _lengths(self) -> list[Tensor]:
        return [Tensor("lengths", "int64", ("batch",))] if self.lengths else []

    @property
    def _types(self) -> dict[str, str]:
        rounded = {} if self.rounded == "none" else {"X": self.rounded}
        return {"T": self.dtype, "W": self.form, **rounded, "shape": f"{self.rows}x{self.columns}"}


def _blocks(tokens: int, rows: int, columns: int) -> dict[str, Any]:
    return {"BLOCK_TOKENS": tokens, "BLOCK_N": rows, "BLOCK_K": columns}


def _grid(tokens: int | None, rows: int, block: int) -> Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]:
    """Programs of ``block`` rows and ``tokens`` tokens, or of all tokens for None."""
    if tokens is None:
        return lambda sizes: (ceil_div(rows, block), 1, 1)
    return lambda sizes: (ceil_div(sizes["batch"] * sizes["steps"], tokens), ceil_div(rows, block), 1)


def _release() -> list[Kernel]:
    """Kinds of projections of the 30B release, in bfloat16; for W4A4, a shared expert's."""
    projections = (
        _Linear(4096, 2688, "plain", "none", "bfloat16", True),  # queries
        _Linear(10304, 2688, "fp8", "fp8", "bfloat16", True),  # Mamba-2's input
        _Linear(2688, 4096, "fp8", "none", "bfloat16", True),  # Mamba-2's output
        _Linear(3712, 2688, "nvfp4", "none", "bfloat16", True),  # a shared expert
        _Linear(131072, 2688, "nvfp4", "none", "bfloat16", False),  # the head
        _Linear(3712, 2688, "nvfp4", "nvfp4", "bfloat16", True),
    )
    return [kernel for linear in projections for kernel in linear.kernels()]


KERNELS = _release()
