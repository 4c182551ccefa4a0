# SPDX-License-Identifier: Apache-2.0
"""Reference of ``RoutedExperts``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def function(attributes: Mapping[str, Any], present: Collection[str]) -> str:
    """The body in standard ops: sort the (token, choice) pairs by expert, split, one MLP per expert, scatter back.

    An expert without tokens multiplies zero rows. Padding tokens go to a virtual expert E that returns zeros.
    """
    count = int(attributes["num_experts"])
    parts = ", ".join(f"part_{e}" for e in range(count + 1))
    outs = ", ".join(f"out_{e}" for e in range(count + 1))
    experts = "".join(
        f"""
      up_c_{e} = CastLike (experts_{e}, x)
      up_t_{e} = Transpose <perm = [1, 0]> (up_c_{e})
      hidden_{e} = MatMul (part_{e}, up_t_{e})
      relu_{e} = Relu (hidden_{e})
      square_{e} = Mul (relu_{e}, relu_{e})
      down_c_{e} = CastLike (experts_{count + e}, x)
      down_t_{e} = Transpose <perm = [1, 0]> (down_c_{e})
      out_{e} = MatMul (square_{e}, down_t_{e})"""
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


def reference(
    x: Array,
    indices: NDArray[np.int64],
    weights: Array,
    lengths: NDArray[np.int64],
    *experts: Array,
    num_experts: int,
) -> Array:
    """One token and one choice at a time. Shapes as in the schema."""
    y = np.zeros_like(x)
    for row, n in enumerate(lengths):
        for t in range(int(n)):
            for e, weight in zip(indices[row, t], weights[row, t], strict=True):
                hidden = np.maximum(experts[e].astype(x.dtype) @ x[row, t], 0) ** 2
                y[row, t] += weight * (experts[num_experts + e].astype(x.dtype) @ hidden)
    return y
