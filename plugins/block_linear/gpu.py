# SPDX-License-Identifier: Apache-2.0
"""``BlockLinear`` on a GPU; see schema.py. The weight is read as stored, ``plugins/gpu/stored.py``.

- ``vector_T``: T tokens a program, which multiplies a few rows of the weight with each in float32.
- ``tile_T``: T tokens a program, by dot products. Codes of E4M3, and of E2M1 times their block's scale, are exact in
  the operands.
- ``codes_T``: as ``tile_T``, on architectures whose tensor cores multiply codes of both sides.
- ``round``: where activations are rounded, a node of its own before the others, which then read codes.

All but ``round`` are variants of one launch, each right for any number of tokens. **In each, a token's result does not
depend on how many tokens a launch has, nor on its place among them, to the bit**: all sums run along the columns, in
one order. (Of tensor cores that takes for granted that they treat the columns of an operand alike; the interpreter
cannot show it.) Two variants add up in different orders, so whoever verifies drafts takes the variant that decodes.

What it costs, in bytes of the weight for n tokens: memory is read once, as programs that share rows run side by side;
the cache is read, and codes are decoded, ceil(n / T) times. ``tile_16`` decodes once for 16 tokens and leaves products
to tensor cores, so it suits graphs that decode and verify; ``vector_1`` suits those that only decode, and T = 64 and
T = 128 suit prompts.

Rows at or past ``lengths`` are not computed. The portable op's scalars are tensors of one element here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl

from nemo_build.plugins.block_linear.gpu_rounding import ROUND
from nemo_build.plugins.gpu.kernel import Kernel, Tensor, ceil_div
from nemo_build.plugins.gpu.products import NEEDED, code_products, tile_products
from nemo_build.plugins.gpu.stored import (
    TILE_FACTORS,
    VECTOR_FACTORS,
    add_products,
    group_size,
    load_group_scales,
    load_values,
    load_vector,
    rounded_tensors,
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
    """``BLOCK_N`` outputs of ``BLOCK_TOKENS`` (1 or 4) tokens."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < N
    at = row.to(tl.int64)
    sums_0 = tl.zeros((BLOCK_N, BLOCK_K // GROUP), tl.float32)
    sums_1 = sums_0
    sums_2 = sums_0
    sums_3 = sums_0
    first = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, 1)  # a block of one token
    on_0 = is_token(first, lengths, batch, steps)
    on_1 = is_token(first + 1, lengths, batch, steps)
    on_2 = is_token(first + 2, lengths, batch, steps)
    on_3 = is_token(first + 3, lengths, batch, steps)
    any_on = on_0 if BLOCK_TOKENS == 1 else on_0 | on_1 | on_2 | on_3
    if tl.max(any_on.to(tl.int32), 0) == 0:
        return
    first = first.to(tl.int64)
    for k in range(0, K, BLOCK_K):
        values = load_values(weight, at, there, k, K, BLOCK_K, FORMAT, GROUP)
        scales = None
        if FORMAT == "nvfp4":
            scales = load_group_scales(weight_scale, at, there, k, K, BLOCK_K, GROUP)
        sums_0 = _add(sums_0, values, scales, x, x_scale, first, on_0, k, K, BLOCK_K, X_FORMAT, GROUP)
        if BLOCK_TOKENS == 4:
            sums_1 = _add(sums_1, values, scales, x, x_scale, first + 1, on_1, k, K, BLOCK_K, X_FORMAT, GROUP)
            sums_2 = _add(sums_2, values, scales, x, x_scale, first + 2, on_2, k, K, BLOCK_K, X_FORMAT, GROUP)
            sums_3 = _add(sums_3, values, scales, x, x_scale, first + 3, on_3, k, K, BLOCK_K, X_FORMAT, GROUP)
    factor = _factor(weight_scale, weight_scale_2, input_scale, FACTOR, FORMAT)
    _store_row(y, sums_0, factor, first, row, there & on_0, N)
    if BLOCK_TOKENS == 4:
        _store_row(y, sums_1, factor, first + 1, row, there & on_1, N)
        _store_row(y, sums_2, factor, first + 2, row, there & on_2, N)
        _store_row(y, sums_3, factor, first + 3, row, there & on_3, N)


@triton.jit
def _add(
    sums,
    values,
    scales,
    x,
    x_scale,
    token,
    on,
    k,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Sums of a token (a block of one), with the products of a tile of weights (values, scales)."""
    vector = load_vector(x, x_scale, token, on, k, K, BLOCK_K, X_FORMAT, GROUP)
    return add_products(sums, values, scales, vector)


@triton.jit
def _store_row(y, sums, factor, token, row, there, N: tl.constexpr):
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
    CODES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``BLOCK_N`` outputs of ``BLOCK_TOKENS`` tokens."""
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    active = is_token(token, lengths, batch, steps)
    if tl.max(active.to(tl.int32), 0) == 0:
        return
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    there = row < N
    row, token = row.to(tl.int64), token.to(tl.int64)
    if CODES:
        sums = code_products(weight, weight_scale, row, there, x, x_scale, token, active, K, FORMAT, BLOCK_K)
    else:
        sums = tile_products(
            weight, weight_scale, row, there, x, x_scale, token, active, K, FORMAT, X_FORMAT, GROUP, BLOCK_K
        )
    sums *= _factor(weight_scale, weight_scale_2, input_scale, FACTOR, FORMAT)
    at = token[None, :] * N + row[:, None]
    tl.store(y + at, sums.to(y.dtype.element_ty), there[:, None] & active[None, :])


_TYPES = ("float32", "float16", "bfloat16")
TILES = (16, 64, 128)
"""Tokens of a program that multiplies tiles."""


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
        made = [self.vector(1), self.vector(4), *(self.tile(tokens) for tokens in TILES)]
        return made if self.rounded == "none" else [self.round(), *made, *map(self.codes, TILES)]

    def vector(self, tokens: int) -> Kernel:
        """``tokens`` a program. The larger a tile, the more bytes are on their way; all of it stays in registers."""
        rows, columns = (8, 1024) if tokens == 1 else (8 if self.form == "plain" else 4, 512)
        constexprs = self._formats() | {"FACTOR": VECTOR_FACTORS[self.form]} | _blocks(tokens, rows, columns)
        grid = _grid(tokens, self.rows, rows)
        return self._multiply(f"vector_{tokens}", vector, constexprs, grid, per_token=True)

    def tile(self, tokens: int) -> Kernel:
        """``tokens`` a program, or fewer for float32, whose tiles are larger."""
        wide = self.dtype == "float32" and self.rounded == "none"
        block_n, block_k = 64 if tokens == 16 or wide else 128, 32 if wide else 64
        if tokens == 16 and self.rows < 128 * block_n:  # flatter tiles, for more programs
            block_n, block_k = block_n // 2, block_k * 2
        constexprs = self._formats() | _blocks(min(tokens, 64 if wide else 128), block_n, block_k)
        factor = TILE_FACTORS[self.form] * TILE_FACTORS[constexprs["X_FORMAT"]]
        constexprs |= {"FACTOR": factor, "CODES": False}
        return self._tile(f"tile_{tokens}", constexprs)

    def codes(self, tokens: int) -> Kernel:
        """As :meth:`tile`, on tensor cores that multiply codes."""
        constexprs = self._formats() | {"FACTOR": 1.0, "CODES": True} | _blocks(tokens, 128, 128)
        return self._tile(f"codes_{tokens}", constexprs, **NEEDED[self.form])

    def _tile(self, name: str, constexprs: dict[str, Any], **launch: Any) -> Kernel:
        """Two stages keep 64 tokens within what a launch has of shared memory without asking."""
        tokens, rows = constexprs["BLOCK_TOKENS"], constexprs["BLOCK_N"]
        grid = _grid(tokens, self.rows, rows)
        launch |= {"num_warps": 8 if tokens == 128 else 4, "num_stages": 2 if tokens == 64 else 3}
        return self._multiply(name, tile, constexprs, grid, per_token=tokens == 16, **launch)

    def round(self) -> Kernel:
        """Codes of the activations, and their block scales where the format has some."""
        return Kernel(
            op="BlockLinear",
            name="round",
            stage="round",
            types=self._types,
            function=ROUND[self.rounded],
            inputs=(self._plain_x, *self._lengths, Tensor("input_scale", "float32", (1,))),
            sizes=("batch", "steps"),
            outputs=tuple(self._codes),
            constexprs={"K": self.columns, "COLUMNS": 1024, **({} if self.lengths else {"lengths": None})},
            grid=lambda sizes: (sizes["batch"] * sizes["steps"], ceil_div(self.columns, 1024), 1),
            per_token=True,
        )

    def _multiply(
        self, name: str, function: Any, constexprs: dict[str, Any], grid: Any, **launch: Any
    ) -> Kernel:
        """A kernel that multiplies ``x``, rounded before or as it is."""
        weight, *scales = stored_tensors("weight", self.form, self.dtype, (self.rows,), self.columns, 1)
        given = [self._plain_x] if self.rounded == "none" else self._codes
        x, *x_scale = (replace(t, name=n) for t, n in zip(given, ("x", "x_scale"), strict=False))
        unit = [] if self.rounded == "none" else [Tensor("input_scale", "float32", (1,))]
        inputs = (x, weight, *self._lengths, *scales, *unit, *x_scale)
        optional = ("lengths", "weight_scale", "weight_scale_2", "input_scale", "x_scale")
        absent = dict.fromkeys(set(optional) - {t.name for t in inputs})
        return Kernel(
            op="BlockLinear",
            name=name,
            stage="multiply",
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
    def _codes(self) -> list[Tensor]:
        """Codes, and block scales of nvfp4; the scale of the whole is ``input_scale``."""
        return rounded_tensors(self.rounded, ("batch", "steps"), self.columns)

    @property
    def _lengths(self) -> list[Tensor]:
        return [Tensor("lengths", "int64", ("batch",))] if self.lengths else []

    @property
    def _types(self) -> dict[str, str]:
        rounded = {} if self.rounded == "none" else {"X": self.rounded}
        return {"T": self.dtype, "W": self.form, **rounded, "shape": f"{self.rows}x{self.columns}"}


def _blocks(tokens: int, rows: int, columns: int) -> dict[str, Any]:
    return {"BLOCK_TOKENS": tokens, "BLOCK_N": rows, "BLOCK_K": columns}


def _grid(tokens: int, rows: int, block: int) -> Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]:
    """Programs of ``block`` rows and ``tokens`` tokens; those of the same rows lie side by side."""
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
