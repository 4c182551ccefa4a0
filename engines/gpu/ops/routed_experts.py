# SPDX-License-Identifier: Apache-2.0
"""``RoutedExperts`` as kernel nodes, in one of two ways.

- Token by token: ``step_up``, ``step_down``. A token's experts are read for that token alone.
- Sorted: ``route``, ``up_T``, ``down_T``, ``combine``. An expert's weights are read once for up to T of its tokens.

Prompts are sorted, with T = 64. Decoding is of one way for a whole engine, so that what a token gives does not depend
on how many are verified with it: both ways compute a token by itself, in one order of operations, and they differ from
one another in the last bits. Token by token takes two launches in place of four, and reads an expert again for each
token that chose it. It is the way of engines that cannot have more pairs of token and choice in a step than experts, of
which few are then chosen twice. Others are sorted, with T = 16.

Where the checkpoint says so, ``round_up`` and ``round_down`` come before the two projections of either way.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from nemo_build.engines.gpu.ops import KernelOps
from nemo_build.engines.lowering import StoredProjection
from nemo_build.engines.trt.ops import Context, attributes_of
from nemo_build.engines.trt.phases import DECODE, Phase

OP = "RoutedExperts"


def is_token_by_token(phase: Phase, experts: int, top_k: int) -> bool:
    """Which of the two ways a graph has."""
    return phase.name == DECODE and phase.slots * phase.steps * top_k <= experts


def lower(k: KernelOps, c: Context, node: onnx.NodeProto) -> None:
    """``[B, L, H]`` in and out; choices and their weights ``[B, L, k]``."""
    x, indices, weights, lengths = node.input[:4]
    experts = _Experts(k, c, node)
    given = {"x": k.cast(c, x), "indices": indices, "weights": k.cast(c, weights), "lengths": lengths}
    if is_token_by_token(c.phase, experts.count, experts.top_k):
        hidden = experts.project("up", ["step_up"], given, "x")["hidden"]
        y = experts.project("down", ["step_down"], given | {"hidden": hidden}, "hidden")["y"]
    else:
        pairs = 16 if c.phase.name == DECODE else 64
        given |= experts.launch(["route"], given)
        for part in ("up", "down"):
            given["x"] = experts.project(part, experts.tiles(part, pairs), given, "x")["y"]
        y = experts.launch(["combine"], given | {"outputs": given["x"]})["y"]
    c.g.op("Identity", c.to_float(y), out=node.output[0])


class _Experts:
    """The experts of a node: their weights, and kernel nodes of their widths."""

    def __init__(self, k: KernelOps, c: Context, node: onnx.NodeProto) -> None:
        self._k, self._c = k, c
        attributes, names = attributes_of(node), list(node.input[4:])
        if node.input[1] not in k.top_k:
            raise ValueError("how many experts a token has is no constant of the graph")
        self.count, self.top_k = int(attributes["num_experts"]), k.top_k[node.input[1]]
        stored_rounding = attributes.get("activation_format", "none")
        self.is_rounded = stored_rounding != "none" and k.weights.keeps_rounding
        has_scales, half = stored_rounding != "none", len(names) // 2
        up, self._up = self._half(names[:half], has_scales)
        _, self._down = self._half(names[half:], has_scales)
        self._dims = {"hidden": up.columns, "inner": up.rows, "top_k": self.top_k}
        self._attributes = {"num_experts": self.count, "weight_format": up.stored_format}
        if self.is_rounded:
            self._attributes["activation_format"] = stored_rounding

    def _half(self, names: list[str], has_scales: bool) -> tuple[StoredProjection, dict[str, str]]:
        """The first expert's up or down projection, and the inputs that hold those of all."""
        tensors, weights = self._c.weights.tensors, self._k.weights
        columns = [names[i : i + self.count] for i in range(0, len(names), self.count)]
        scales = columns.pop() if has_scales else []
        name = columns[0][0].replace(".experts.0.", ".experts.")
        projections = [StoredProjection.of([tensors[p[e]] for p in columns]) for e in range(self.count)]
        stored = weights.stored(name, projections, stacked=True)
        if self.is_rounded:
            stored["input_scale"] = weights.numbers(f"{name}.input_scales", [tensors[s] for s in scales])
        return projections[0], stored

    def launch(self, launches: list[str], values: Mapping[str, str]) -> dict[str, str]:
        """A kernel node."""
        return self._k.launch(self._c, OP, launches, self._attributes, self._dims, values)

    def project(
        self, part: str, launches: list[str], given: Mapping[str, str], source: str
    ) -> dict[str, str]:
        """The up or the down projection; `source` is the kernel's parameter that it multiplies by."""
        values = {**given, **(self._up if part == "up" else self._down)}
        if self.is_rounded:
            codes = self.launch([f"round_{part}"], values | {"x": values[source]})
            values |= {source: codes["codes"], "x_scale": codes.get("scales", "")}
        return self.launch(launches, values)

    def tiles(self, part: str, pairs: int) -> list[str]:
        """The kernels of a projection of sorted pairs, the best first."""
        return [*([f"{part}_codes_{pairs}"] if self.is_rounded else []), f"{part}_{pairs}"]
