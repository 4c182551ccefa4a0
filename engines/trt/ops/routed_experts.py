# SPDX-License-Identifier: Apache-2.0
"""``RoutedExperts`` in two formulations.

For few tokens, the rows of the chosen experts are looked up, decoded, multiplied and summed in float32, which the
compiler makes one kernel that reads no other expert. Inputs are not rounded there, whatever the checkpoint says.

For many, each expert has a buffer of :data:`~nemo_build.engines.trt.phases.EXPERT_ROWS` rows, tokens are dealt
out to them, and all experts are multiplied at once. The last row of each takes what does not count: padding, and
tokens beyond the expert's capacity, whose number the graph tells.
"""

from __future__ import annotations

import onnx

from nemo_build.engines.lowering import StoredProjection
from nemo_build.engines.trt.emitter import INT64, TO_END
from nemo_build.engines.trt.forms import Matrix
from nemo_build.engines.trt.ops import Context, attributes_of
from nemo_build.engines.trt.phases import DECODE, EXPERT_ROWS

OP = "RoutedExperts"


def lower(c: Context, node: onnx.NodeProto) -> None:
    """``[B, L, H]`` in and out; choices and their weights ``[B, L, k]``."""
    x, indices, weights, lengths = node.input[:4]
    g = c.g
    (up, up_scale), (down, down_scale) = _matrices(c, node)
    if c.phase.name == DECODE:
        g.op("Identity", _looked_up(c, x, indices, weights, up, down), out=node.output[0])
        return
    tokens = g.reshape(x, -1, up.columns)
    chosen, factors = (g.op("Flatten", v, axis=2) for v in (indices, weights))
    buffer, at = _deal(c, tokens, chosen, lengths, x, up)
    hidden = _square(c, c.weights.multiply(c, buffer, up, up_scale))
    result = c.weights.multiply(c, hidden, down, down_scale)
    taken = g.op("GatherND", result, at)
    y = g.op("ReduceSum", g.op("Mul", taken, g.unsqueeze(factors, 2)), g.ints(1), keepdims=0)
    g.op("Reshape", y, g.op("Shape", x), out=node.output[0])


def _matrices(c: Context, node: onnx.NodeProto) -> list[tuple[Matrix, str]]:
    """The up and down projections of all experts, each with the scale that its input is rounded with, or none.

    Experts have input scales of their own, but are multiplied at once: they share the largest.
    """
    attributes = attributes_of(node)
    count = int(attributes["num_experts"])
    is_rounded = attributes.get("activation_format", "none") != "none"
    names = list(node.input[4:])
    found = []
    for half in (names[: len(names) // 2], names[len(names) // 2 :]):
        columns = [half[i : i + count] for i in range(0, len(half), count)]
        scales = columns.pop() if is_rounded else []
        stored = [StoredProjection.of([c.weights.tensors[p[e]] for p in columns]) for e in range(count)]
        name = columns[0][0].replace(".experts.0.", ".experts.")
        matrix = c.weights.matrix(name, stored, stacked=True, multiplied=c.phase.name != DECODE)
        scale = ""
        if scales and c.phase.name != DECODE and c.weights.rounds(matrix):
            scale = c.weights.largest(f"{name}.input_scale", [c.weights.tensors[s] for s in scales])
        found.append((matrix, scale))
    return found


def _square(c: Context, x: str) -> str:
    """``relu(x)^2``."""
    positive = c.g.op("Relu", x)
    return c.g.op("Mul", positive, positive)


def _looked_up(c: Context, x: str, chosen: str, factors: str, up: Matrix, down: Matrix) -> str:
    """`x` ``[B, L, H]`` through the tokens' experts, summed: ``[B, L, H]``.

    Whether the compiler makes one kernel of it hangs on the profile; see
    :func:`~nemo_build.engines.trt.builder.profile_of`.
    """
    g = c.g

    def project(v: str, matrix: Matrix) -> str:
        """`v` ``[B, L, k or 1, 1, K]`` times the rows of the chosen experts: ``[B, L, k, N]``."""
        rows = c.to_float(g.op("Gather", matrix.module.emit(c, matrix, c.compute), chosen, axis=0))
        sums = g.op("ReduceSum", g.op("Mul", rows, v), g.ints(4), keepdims=0)
        if not matrix.factor:
            return sums
        return g.op("Mul", sums, g.unsqueeze(g.op("Gather", matrix.factor, chosen, axis=0), 3))

    hidden = _square(c, project(g.unsqueeze(x, 2, 3), up))
    weighted = g.op("Mul", project(g.unsqueeze(hidden, 3), down), g.unsqueeze(factors, 3))
    return g.op("ReduceSum", weighted, g.ints(2), keepdims=0)


def _deal(c: Context, tokens: str, chosen: str, lengths: str, x: str, up: Matrix) -> tuple[str, str]:
    """The experts' buffers ``[E, rows, H]``, and where each token is in them for each of its choices ``[T, k, 2]``."""
    g, count, dropped = c.g, len(up.projections), EXPERT_ROWS - 1
    valid = g.reshape(c.is_valid(lengths, x), -1, 1)
    one_hot = g.op("Equal", g.unsqueeze(chosen, 2), g.ints(*range(count)))
    picks = g.op("ReduceSum", g.cast(one_hot, INT64), g.ints(1), keepdims=0)
    counted = g.op("Mul", picks, g.cast(valid, INT64))
    loads = g.op("CumSum", counted, g.integer(0))
    place = g.op("GatherElements", g.op("Sub", loads, g.integer(1)), chosen, axis=1)
    is_held = g.op("And", valid, g.op("Less", place, g.integer(dropped)))
    row = g.op("Where", is_held, place, g.integer(dropped))
    at = g.op("Concat", g.unsqueeze(chosen, 2), g.unsqueeze(row, 2), axis=2)
    most = g.op("ReduceMax", g.slice(loads, -1, TO_END, 0), keepdims=0)
    over = g.op("Max", g.op("Sub", most, g.integer(dropped)), g.integer(0))
    c.overflows.append(g.reshape(over, 1))

    empty = g.op("Expand", g.number(0), g.ints(count, EXPERT_ROWS, up.columns))
    top_k = g.op("Concat", g.ints(1), g.op("Shape", chosen, start=1, end=2), g.ints(1), axis=0)
    copies = g.op("Expand", g.unsqueeze(tokens, 1), top_k)
    return g.op("ScatterND", empty, at, copies), at
