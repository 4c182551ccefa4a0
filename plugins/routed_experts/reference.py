# SPDX-License-Identifier: Apache-2.0
"""Reference of ``RoutedExperts``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.formats import ACTIVATIONS, activations, formats

Array = NDArray[Any]


def function(attributes: Mapping[str, Any], present: Collection[str]) -> str:
    """The body in standard ops: sort the (token, choice) pairs by expert, split, one MLP per expert, scatter back.

    An expert without tokens multiplies zero rows. Padding tokens go to a virtual expert E that returns zeros.
    """
    count = int(attributes["num_experts"])
    up, down = _names(attributes, sum(n.startswith("experts_") for n in present))
    parts = ", ".join(f"part_{e}" for e in range(count + 1))
    outs = ", ".join(f"out_{e}" for e in range(count + 1))
    experts = "".join(
        f"""
      {_project(attributes, f"hidden_{e}", f"part_{e}", [p[e] for p in up])}
      relu_{e} = Relu (hidden_{e})
      square_{e} = Mul (relu_{e}, relu_{e})
      {_project(attributes, f"out_{e}", f"square_{e}", [p[e] for p in down])}"""
        for e in range(count)
    )
    return f"""
      zero = Constant <value_int = 0> ()
      one = Constant <value_int = 1> ()
      count = Constant <value_int = {count}> ()
      count_1 = Constant <value_int = {count + 1}> ()
      zero1 = Constant <value_ints = [0]> ()
      one1 = Constant <value_ints = [1]> ()
      minus1 = Constant <value_ints = [-1]> ()
      zero_x = CastLike (zero, x)

      x_shape = Shape (x)
      steps = Shape <start = 1, end = 2> (x)
      steps0 = Squeeze (steps, zero1)
      width = Shape <start = 2, end = 3> (x)
      top_k = Shape <start = 2, end = 3> (indices)
      time = Range (zero, steps0, one)
      lengths2 = Unsqueeze (lengths, one1)
      valid = Less (time, lengths2)
      valid3 = Unsqueeze (valid, minus1)
      chosen = Where (valid3, indices, count)
      chosen1 = Reshape (chosen, minus1)
      pairs = Shape (chosen1)
      sorted, order = TopK <largest = 0, sorted = 1> (chosen1, pairs)
      all_experts = Range (zero, count_1, one)
      chosen2 = Unsqueeze (chosen1, minus1)
      is_expert = Equal (chosen2, all_experts)
      is_expert_i = Cast <to = 7> (is_expert)
      counts = ReduceSum <keepdims = 0> (is_expert_i, zero1)

      flat_shape = Concat <axis = 0> (minus1, width)
      tokens = Reshape (x, flat_shape)
      source = Div (order, top_k)
      gathered = Gather <axis = 0> (tokens, source)
      {parts} = Split <axis = 0> (gathered, counts)
      {experts}
      pad_shape = Shape (part_{count})
      out_{count} = Expand (zero_x, pad_shape)
      stacked = Concat <axis = 0> ({outs})
      order2 = Unsqueeze (order, minus1)
      blank_shape = Concat <axis = 0> (pairs, width)
      blank = Expand (zero_x, blank_shape)
      unsorted = ScatterND (blank, order2, stacked)
      triple_shape = Concat <axis = 0> (minus1, top_k, width)
      per_choice = Reshape (unsorted, triple_shape)
      factor_shape = Concat <axis = 0> (minus1, top_k, one1)
      factors = Reshape (weights, factor_shape)
      weighted = Mul (per_choice, factors)
      summed = ReduceSum <keepdims = 0> (weighted, one1)
      y = Reshape (summed, x_shape)
    """


def _names(attributes: Mapping[str, Any], inputs: int) -> tuple[list[list[str]], list[list[str]]]:
    """Names of the inputs of both projections: for each part, one name an expert."""
    count = int(attributes["num_experts"])
    rows = [[f"experts_{start + e}" for e in range(count)] for start in range(0, inputs, count)]
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


def _project(attributes: Mapping[str, Any], out: str, x: str, parts: list[str]) -> str:
    """One expert's projection; the last of `parts` is the input scale where activations are rounded."""
    activation = attributes.get("activation_format", "none")
    weights, scale = (parts, "") if activation == "none" else (parts[:-1], parts[-1])
    return f"""
      {ACTIVATIONS[activation](f"{out}_x", x, scale, f"{out}_q")}
      {formats()[attributes.get("weight_format", "plain")].dequantize(f"{out}_w", weights, x)}
      {out}_t = Transpose <perm = [1, 0]> ({out}_w)
      {out} = MatMul ({out}_x, {out}_t)"""


def reference(
    x: Array,
    indices: NDArray[np.int64],
    weights: Array,
    lengths: NDArray[np.int64],
    *experts: Array,
    num_experts: int,
    weight_format: str = "plain",
    activation_format: str = "none",
) -> Array:
    """One token and one choice at a time. Shapes as in the schema."""
    per_expert = [experts[e::num_experts] for e in range(num_experts)]
    y = np.zeros_like(x)

    def project(v: Array, parts: tuple[Array, ...]) -> Array:
        scale = None if activation_format == "none" else parts[-1]
        stored = parts if scale is None else parts[:-1]
        w = formats()[weight_format].decode(*stored).astype(x.dtype)
        result: Array = w @ activations.reference(activation_format, v, scale)
        return result

    for row, n in enumerate(lengths):
        for t in range(int(n)):
            for e, weight in zip(indices[row, t], weights[row, t], strict=True):
                parts = per_expert[e]
                half = len(parts) // 2
                hidden = np.maximum(project(x[row, t], parts[:half]), 0) ** 2
                y[row, t] += weight * project(hidden, parts[half:])
    return y
