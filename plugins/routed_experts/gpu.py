# SPDX-License-Identifier: Apache-2.0
"""``RoutedExperts`` on a GPU; see schema.py. Weights are read as stored, ``plugins/gpu/stored.py``.

The portable op has an input for every expert, as checkpoints store them. Kernels take an expert's weight by its index,
so a build stacks each kind of tensor along a new first axis, ``[E, F, H]`` up and ``[E, H, F]`` down; it lays weights
out anew in any case. Two ways through the op, one node for each launch:

- few tokens (``gpu_steps.py``): ``step_up``, ``step_down``;
- many tokens (``gpu_tiles.py``): ``route`` sorts the pairs of token and choice by expert, ``up_T`` and ``down_T``
  multiply T pairs of an expert at a time, ``combine`` adds a token's choices. ``up_codes_T`` and ``down_codes_T`` are
  variants for architectures whose tensor cores multiply codes of both sides.

Where activations are rounded, ``round_up`` comes before the up projection of either way and ``round_down`` before the
down projection (``gpu_rounding.py``); these then read codes, one row for each pair.

**A token's result does not depend on how many tokens a launch has, nor on its place among them, to the bit**, on
either way and with each T. (Of tensor cores that takes for granted that they treat the columns of an operand alike.)
The ways, and different T, add up in different orders, so whoever verifies drafts takes what decodes. In bytes of
weights: n tokens that choose k of E experts independently need E (1 - (1 - k/E)^n) of these from memory. Steps read k n
experts, at best those that another pair has read from the cache; tiles read one for T pairs of it, and take two
launches more. While few pairs share an expert both read the same. T = 64 is for prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_build.plugins.gpu.kernel import Kernel, Tensor, ceil_div, power_of_two
from nemo_build.plugins.gpu.products import NEEDED
from nemo_build.plugins.gpu.stored import (
    TILE_FACTORS,
    VECTOR_FACTORS,
    group_size,
    rounded_tensors,
    stored_tensors,
)
from nemo_build.plugins.routed_experts.gpu_rounding import ROUND
from nemo_build.plugins.routed_experts.gpu_steps import step_down, step_up
from nemo_build.plugins.routed_experts.gpu_tiles import combine, route, tile

_TYPES = ("float32", "float16", "bfloat16")
_LENGTHS = Tensor("lengths", "int64", ("batch",))


def kernels(attributes: Mapping[str, Any], dims: Mapping[str, int]) -> list[Kernel]:
    """All launches of both ways, for each type of activations.

    Plain weights are of the activations' type: a build converts them. Between ``up`` and ``down`` lies ``hidden``
    ``[pairs, F]``, between ``down`` and ``combine`` ``outputs`` in float32.

    Args:
        attributes: ``num_experts``, ``weight_format`` and ``activation_format``.
        dims: ``hidden`` (H), ``inner`` (F) and ``top_k``.

    Raises:
        ValueError: H or F is not a multiple of 16 and the format has codes, or no kernel multiplies the two formats.
    """
    form, rounded = attributes.get("weight_format", "plain"), attributes.get("activation_format", "none")
    if rounded not in ("none", form):
        raise ValueError(f"No kernel multiplies experts in {form} by activations in {rounded}.")
    count, width, inner, top_k = attributes["num_experts"], dims["hidden"], dims["inner"], dims["top_k"]
    made = (_Experts(count, width, inner, top_k, form, rounded, dtype) for dtype in _TYPES)
    return [kernel for experts in made for kernel in experts.kernels()]


@dataclass(frozen=True)
class _Experts:
    """The experts of a layer, and what their kernels are called with."""

    count: int
    width: int
    inner: int
    top_k: int
    form: str
    rounded: str
    dtype: str

    def kernels(self) -> list[Kernel]:
        tiles = [self.tile(up, pairs) for pairs in (16, 64) for up in (True, False)]
        made = [self.step(True), self.step(False), self.route(), *tiles, self.combine()]
        if self.rounded == "none":
            return made
        codes = [self.codes(up, pairs) for pairs in (16, 64) for up in (True, False)]
        return [self.round(True), self.round(False), *made, *codes]

    def round(self, up: bool) -> Kernel:
        """Codes of one projection's inputs."""
        x, hidden, _ = self._ends
        columns = self.width if up else self.inner
        return self._kernel(
            "round_up" if up else "round_down",
            ROUND[self.rounded],
            (replace(x if up else hidden, name="x"), self._indices, _LENGTHS, self._input_scale),
            tuple(rounded_tensors(self.rounded, self._pairs, columns)),
            {"K": columns, "TOP_K": self.top_k, "OF_TOKENS": up, "COLUMNS": 1024},
            lambda sizes: (sizes["batch"] * sizes["steps"] * self.top_k, ceil_div(columns, 1024), 1),
            per_token=True,
        )

    def step(self, up: bool) -> Kernel:
        """One projection of few tokens."""
        rows, columns = (self.inner, self.width) if up else (self.width, self.inner)
        x, *x_scale = self._inputs(up, "x" if up else "hidden")
        _, hidden, y = self._ends
        inputs = (x, self._indices, *([] if up else [self._weights]), _LENGTHS)
        programs = self.top_k if up else 1
        return self._kernel(
            "step_up" if up else "step_down",
            step_up if up else step_down,
            (*inputs, *self._stored(rows, columns), *x_scale),
            (hidden if up else y,),
            self._widths(rows, columns, VECTOR_FACTORS[self.form]) | {"BLOCK_N": 8, "BLOCK_K": 1024},
            lambda sizes: (sizes["batch"] * sizes["steps"] * programs, ceil_div(rows, 8), 1),
            per_token=True,
        )

    def route(self) -> Kernel:
        """The order of the pairs."""
        return self._kernel(
            "route",
            route,
            (self._indices, _LENGTHS),
            self._sorted,
            {"EXPERTS": self.count, "TOP_K": self.top_k, "BLOCK_PAIRS": 1024},
            lambda sizes: (self.count, 1, 1),
            per_token=True,
        )

    def tile(self, up: bool, pairs: int) -> Kernel:
        """One projection of many tokens, ``pairs`` of an expert a program."""
        wide = self.dtype == "float32" and self.rounded == "none"
        blocks = {"BLOCK_N": 64 if pairs == 16 or wide else 128, "BLOCK_K": 32 if wide else 64}
        factor = TILE_FACTORS[self.form] * TILE_FACTORS[self._x_format]
        constexprs = {"FACTOR": factor, "CODES": False, **blocks}
        # Decoding both sides takes the registers of a third stage.
        stages = 3 if pairs == 16 and self.rounded == "none" else 2
        return self._tile(up, "", pairs, constexprs, num_stages=stages)

    def codes(self, up: bool, pairs: int) -> Kernel:
        """As :meth:`tile`, on tensor cores that multiply codes."""
        constexprs = {"FACTOR": 1.0, "CODES": True, "BLOCK_N": 128, "BLOCK_K": 128}
        stages = 3 if pairs == 16 else 2
        return self._tile(up, "codes_", pairs, constexprs, num_stages=stages, **NEEDED[self.form])

    def _tile(self, up: bool, kind: str, pairs: int, how: dict[str, Any], **launch: Any) -> Kernel:
        """Two stages keep 64 pairs within what a launch has of shared memory without asking."""
        rows, columns = (self.inner, self.width) if up else (self.width, self.inner)
        x, *x_scale = self._inputs(up, "x")
        constexprs = {"EXPERTS": self.count, "BLOCK_EXPERTS": power_of_two(self.count), "BLOCK_PAIRS": pairs}
        stage = "up" if up else "down"
        return self._kernel(
            f"{stage}_{kind}{pairs}",
            tile,
            (x, *self._sorted, *self._stored(rows, columns), *x_scale),
            (replace(self._ends[1] if up else self._outputs, name="y"),),
            self._widths(rows, columns, how["FACTOR"]) | constexprs | how | {"UP": up},
            lambda sizes: (
                ceil_div(rows, how["BLOCK_N"]),
                sizes["batch"] * sizes["steps"] * self.top_k // pairs + self.count,
                1,
            ),
            sizes=(),
            stage=stage,
            per_token=pairs == 16,
            **launch,
        )

    def combine(self) -> Kernel:
        """The sum over the choices."""
        return self._kernel(
            "combine",
            combine,
            (self._outputs, self._weights, _LENGTHS),
            (self._ends[2],),
            {"ROWS": self.width, "TOP_K": self.top_k, "BLOCK_N": 1024},
            lambda sizes: (sizes["batch"] * sizes["steps"], ceil_div(self.width, 1024), 1),
            per_token=True,
        )

    def _kernel(
        self,
        name: str,
        function: Any,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        constexprs: dict[str, Any],
        grid: Callable[[Mapping[str, Any]], tuple[Any, Any, Any]],
        sizes: tuple[str, ...] = ("batch", "steps"),
        stage: str | None = None,
        **launch: Any,
    ) -> Kernel:
        optional = ("weight_scale", "weight_scale_2", "input_scale", "x_scale")
        absent = {n for n in function.arg_names if n in optional} - {t.name for t in inputs}
        rounded = {} if self.rounded == "none" else {"X": self.rounded}
        shape = f"{self.count}x{self.inner}x{self.width}"
        return Kernel(
            op="RoutedExperts",
            name=name,
            stage=name if stage is None else stage,
            types={"T": self.dtype, "W": self.form, **rounded, "shape": shape},
            function=function,
            inputs=inputs,
            sizes=sizes,
            outputs=outputs,
            constexprs=constexprs | dict.fromkeys(absent),
            grid=grid,
            **launch,
        )

    def _widths(self, rows: int, columns: int, factor: float) -> dict[str, Any]:
        group = group_size(self.form, self.dtype)
        form = {"FORMAT": self.form, "X_FORMAT": self._x_format, "FACTOR": factor, "GROUP": group}
        return {"ROWS": rows, "K": columns, "TOP_K": self.top_k} | form

    def _stored(self, rows: int, columns: int) -> list[Tensor]:
        """A projection's tensors, with the scales of its rounded inputs."""
        weight = stored_tensors("weight", self.form, self.dtype, (self.count, rows), columns, self.count)
        return weight if self.rounded == "none" else [*weight, self._input_scale]

    def _inputs(self, up: bool, name: str) -> list[Tensor]:
        """What a projection multiplies by, ``name`` and for codes of nvfp4 ``x_scale``."""
        if self.rounded == "none":
            return [replace(self._ends[0 if up else 1], name=name)]
        given = rounded_tensors(self.rounded, self._pairs, self.width if up else self.inner)
        return [replace(t, name=n) for t, n in zip(given, (name, "x_scale"), strict=False)]

    @property
    def _x_format(self) -> str:
        return "plain" if self.rounded == "none" else self.rounded

    @property
    def _pairs(self) -> tuple[str, str, int]:
        return "batch", "steps", self.top_k

    @property
    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """What goes into the op, what lies between the projections, and what comes out."""
        tokens = ("batch", "steps")
        return (
            Tensor("x", self.dtype, (*tokens, self.width)),
            Tensor("hidden", self.dtype, (*self._pairs, self.inner)),
            Tensor("y", self.dtype, (*tokens, self.width)),
        )

    @property
    def _indices(self) -> Tensor:
        return Tensor("indices", "int64", self._pairs)

    @property
    def _weights(self) -> Tensor:
        return Tensor("weights", self.dtype, self._pairs)

    @property
    def _input_scale(self) -> Tensor:
        return Tensor("input_scale", "float32", (self.count,))

    @property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """Pairs by expert, and where each expert's begin (and the last one's end)."""
        return Tensor("order", "int32", self._pairs), Tensor("offsets", "int32", (self.count + 1,))

    @property
    def _outputs(self) -> Tensor:
        return Tensor("outputs", "float32", (*self._pairs, self.width))


def _release() -> list[Kernel]:
    """The experts of the 30B release in the formats they come in, and in FP8 and W4A4; activations in bfloat16."""
    formats = (("plain", "none"), ("nvfp4", "none"), ("fp8", "none"), ("fp8", "fp8"), ("nvfp4", "nvfp4"))
    return [
        kernel
        for form, rounded in formats
        for kernel in _Experts(128, 2688, 1856, 6, form, rounded, "bfloat16").kernels()
        if form == "plain" or kernel.name not in ("route", "combine")  # these are the same for all
    ]


KERNELS = _release()
