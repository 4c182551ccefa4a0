# SPDX-License-Identifier: Apache-2.0
"""``RoutedExperts`` on a GPU; see schema.py. Weights are read as stored, ``plugins/gpu/stored.py``.

The portable op has an input for every expert, as checkpoints store them. Kernels take an expert's weight by its index,
so a build stacks each kind of tensor along a new first axis, ``[E, F, H]`` up and ``[E, H, F]`` down; it lays weights
out anew in any case. Two ways through the op, one node for each launch:

- few tokens (``gpu_steps.py``): ``step_up``, ``step_down``;
- many tokens (``gpu_tiles.py``): ``route`` sorts the pairs of token and choice by expert, ``up_T`` and ``down_T``
  multiply T pairs of an expert at a time, ``combine`` adds a token's choices. With T = 16 a weight is read once where
  an expert has that few pairs; T = 64 is for prompts.

Activations are not rounded: no kernel here has an ``activation_format`` (experts of the releases are weight-only).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nemo_build.plugins.gpu.kernel import Kernel, Tensor, ceil_div, power_of_two
from nemo_build.plugins.gpu.stored import TILE_FACTORS, VECTOR_FACTORS, group_size, stored_tensors
from nemo_build.plugins.routed_experts.gpu_steps import step_down, step_up
from nemo_build.plugins.routed_experts.gpu_tiles import combine, route, tile

_TYPES = ("float32", "float16", "bfloat16")
_LENGTHS = Tensor("lengths", "int64", ("batch",))


def kernels(attributes: Mapping[str, Any], dims: Mapping[str, int]) -> list[Kernel]:
    """All launches of both ways, for each type of activations.

    Plain weights are of the activations' type: a build converts them. Between ``up`` and ``down`` lies ``hidden``
    ``[pairs, F]``, between ``down`` and ``combine`` ``outputs`` in float32.

    Args:
        attributes: ``num_experts`` and ``weight_format``.
        dims: ``hidden`` (H), ``inner`` (F) and ``top_k``.

    Raises:
        ValueError: H or F is not a multiple of 16 and the format has codes, or activations are to be rounded.
    """
    rounded = attributes.get("activation_format", "none")
    if rounded != "none":
        raise ValueError(f"No kernel rounds the inputs of experts to {rounded}.")
    form = attributes.get("weight_format", "plain")
    count, width, inner, top_k = attributes["num_experts"], dims["hidden"], dims["inner"], dims["top_k"]
    made = (_Experts(count, width, inner, top_k, form, dtype) for dtype in _TYPES)
    return [kernel for experts in made for kernel in experts.kernels()]


@dataclass(frozen=True)
class _Experts:
    """The experts of a layer, and what their kernels are called with."""

    count: int
    width: int
    inner: int
    top_k: int
    form: str
    dtype: str

    def kernels(self) -> list[Kernel]:
        tiles = [self.tile(up, pairs) for pairs in (16, 64) for up in (True, False)]
        return [self.step(True), self.step(False), self.route(), *tiles, self.combine()]

    def step(self, up: bool) -> Kernel:
        """One projection of few tokens."""
        rows, columns = (self.inner, self.width) if up else (self.width, self.inner)
        x, hidden, y = self._ends
        inputs = (x, self._indices, _LENGTHS) if up else (hidden, self._indices, self._weights, _LENGTHS)
        tokens = 1 if not up else self.top_k
        return self._kernel(
            "step_up" if up else "step_down",
            step_up if up else step_down,
            (*inputs, *self._stored(rows, columns)),
            (hidden if up else y,),
            self._widths(rows, columns, VECTOR_FACTORS) | {"BLOCK_N": 8, "BLOCK_K": 1024},
            lambda sizes: (sizes["batch"] * sizes["steps"] * tokens, ceil_div(rows, 8), 1),
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
        )

    def tile(self, up: bool, pairs: int) -> Kernel:
        """One projection of many tokens, ``pairs`` of an expert a program."""
        rows, columns = (self.inner, self.width) if up else (self.width, self.inner)
        x, hidden, _ = self._ends
        block_n = 64 if pairs == 16 or self.dtype == "float32" else 128
        blocks = {"BLOCK_N": block_n, "BLOCK_K": 32 if self.dtype == "float32" else 64, "BLOCK_PAIRS": pairs}
        experts = {"EXPERTS": self.count, "BLOCK_EXPERTS": power_of_two(self.count), "UP": up}
        return self._kernel(
            f"{'up' if up else 'down'}_{pairs}",
            tile,
            (replace(x if up else hidden, name="x"), *self._sorted, *self._stored(rows, columns)),
            (replace(hidden if up else self._outputs, name="y"),),
            self._widths(rows, columns, TILE_FACTORS) | experts | blocks,
            lambda sizes: (
                ceil_div(rows, block_n),
                sizes["batch"] * sizes["steps"] * self.top_k // pairs + self.count,
                1,
            ),
            sizes=(),
            num_stages=3,
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
        **launch: Any,
    ) -> Kernel:
        optional = [n for n in function.arg_names if n in ("weight_scale", "weight_scale_2")]
        absent = dict.fromkeys(set(optional) - {t.name for t in inputs})
        shape = f"{self.count}x{self.inner}x{self.width}"
        return Kernel(
            op="RoutedExperts",
            name=name,
            types={"T": self.dtype, "W": self.form, "shape": shape},
            function=function,
            inputs=inputs,
            sizes=sizes,
            outputs=outputs,
            constexprs=constexprs | absent,
            grid=grid,
            **launch,
        )

    def _widths(self, rows: int, columns: int, factors: Mapping[str, float]) -> dict[str, Any]:
        form = {"FORMAT": self.form, "FACTOR": factors[self.form], "GROUP": group_size(self.form, self.dtype)}
        return {"ROWS": rows, "K": columns, "TOP_K": self.top_k} | form

    def _stored(self, rows: int, columns: int) -> list[Tensor]:
        return stored_tensors("weight", self.form, self.dtype, (self.count, rows), columns, self.count)

    @property
    def _ends(self) -> tuple[Tensor, Tensor, Tensor]:
        """What goes into the op, what lies between the projections, and what comes out."""
        tokens = ("batch", "steps")
        return (
            Tensor("x", self.dtype, (*tokens, self.width)),
            Tensor("hidden", self.dtype, (*tokens, self.top_k, self.inner)),
            Tensor("y", self.dtype, (*tokens, self.width)),
        )

    @property
    def _indices(self) -> Tensor:
        return Tensor("indices", "int64", ("batch", "steps", self.top_k))

    @property
    def _weights(self) -> Tensor:
        return Tensor("weights", self.dtype, ("batch", "steps", self.top_k))

    @property
    def _sorted(self) -> tuple[Tensor, Tensor]:
        """Pairs by expert, and where each expert's begin (and the last one's end)."""
        order = Tensor("order", "int32", ("batch", "steps", self.top_k))
        return order, Tensor("offsets", "int32", (self.count + 1,))

    @property
    def _outputs(self) -> Tensor:
        return Tensor("outputs", "float32", ("batch", "steps", self.top_k, self.width))


def _release() -> list[Kernel]:
    """The experts of the 30B release in the formats they come in, and in FP8; activations in bfloat16."""
    return [
        kernel
        for form in ("plain", "nvfp4", "fp8")
        for kernel in _Experts(128, 2688, 1856, 6, form, "bfloat16").kernels()
        if form == "plain" or kernel.name not in ("route", "combine")  # these are the same for all
    ]


KERNELS = _release()
