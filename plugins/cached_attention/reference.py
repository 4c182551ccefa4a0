# SPDX-License-Identifier: Apache-2.0
"""Reference of ``CachedAttention``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Index = NDArray[np.int64]


def function(attributes: Mapping[str, Any], present: Collection[str]) -> str:
    """The body in standard ops.

    The caches are written first and read afterwards through their outputs, so that each cache input has one
    consumer. Only the positions that some row needs are gathered.
    """
    return """
      zero = Constant <value_int = 0> ()
      one = Constant <value_int = 1> ()
      zero1 = Constant <value_ints = [0]> ()
      one1 = Constant <value_ints = [1]> ()
      minus1 = Constant <value_ints = [-1]> ()
      axes01 = Constant <value_ints = [0, 1]> ()
      axes02 = Constant <value_ints = [0, 2]> ()
      axes12 = Constant <value_ints = [1, 2]> ()
      axes123 = Constant <value_ints = [1, 2, 3]> ()
      zero_x = CastLike (zero, q)
      lowest = Constant <value_float = -3.0e38> ()
      scale_f = Constant <value_float : float = @scale> ()
      scale_q = CastLike (scale_f, q)

      batch = Shape <start = 0, end = 1> (q)
      steps = Shape <start = 1, end = 2> (q)
      steps0 = Squeeze (steps, zero1)
      q_width = Shape <start = 2, end = 3> (q)
      kv_heads = Shape <start = 1, end = 2> (key_cache)
      kv_heads0 = Squeeze (kv_heads, zero1)
      head_dim = Shape <start = 3, end = 4> (key_cache)
      kv_width = Mul (kv_heads, head_dim)
      group = Div (q_width, kv_width)

      time = Range (zero, steps0, one)
      head_range = Range (zero, kv_heads0, one)
      lengths2 = Unsqueeze (lengths, one1)
      past2 = Unsqueeze (past, one1)
      valid = Less (time, lengths2)
      valid1 = Reshape (valid, minus1)
      position = Add (past2, time)
      position1 = Reshape (position, minus1)
      bl = Concat <axis = 0> (batch, steps)
      slots2 = Unsqueeze (slots, one1)
      slots_bl = Expand (slots2, bl)
      slots1 = Reshape (slots_bl, minus1)
      position_on = Compress <axis = 0> (position1, valid1)
      slots_on = Compress <axis = 0> (slots1, valid1)
      n = Shape (slots_on)
      write_shape = Concat <axis = 0> (n, kv_heads, one1)
      slot_w = Unsqueeze (slots_on, axes12)
      slot_w3 = Expand (slot_w, write_shape)
      head_w = Unsqueeze (head_range, axes02)
      head_w3 = Expand (head_w, write_shape)
      position_w = Unsqueeze (position_on, axes12)
      position_w3 = Expand (position_w, write_shape)
      write_at = Concat <axis = -1> (slot_w3, head_w3, position_w3)
      token_shape = Concat <axis = 0> (minus1, kv_heads, head_dim)
      k3 = Reshape (k, token_shape)
      v3 = Reshape (v, token_shape)
      k_on = Compress <axis = 0> (k3, valid1)
      v_on = Compress <axis = 0> (v3, valid1)
      key_cache_out = ScatterND (key_cache, write_at, k_on)
      value_cache_out = ScatterND (value_cache, write_at, v_on)

      all_ends = Add (past, lengths)
      active = Greater (lengths, zero)
      ends = Where (active, all_ends, zero)
      longest = ReduceMax <keepdims = 0> (ends, zero1)
      context0 = Max (longest, one)
      context = Unsqueeze (context0, zero1)
      span = Range (zero, context0, one)
      read_shape = Concat <axis = 0> (batch, kv_heads, context, one1)
      slot_r = Unsqueeze (slots, axes123)
      slot_r4 = Expand (slot_r, read_shape)
      axes023 = Constant <value_ints = [0, 2, 3]> ()
      axes013 = Constant <value_ints = [0, 1, 3]> ()
      head_r = Unsqueeze (head_range, axes023)
      head_r4 = Expand (head_r, read_shape)
      span_r = Unsqueeze (span, axes013)
      span_r4 = Expand (span_r, read_shape)
      read_at = Concat <axis = -1> (slot_r4, head_r4, span_r4)
      keys = GatherND (key_cache_out, read_at)
      values_all = GatherND (value_cache_out, read_at)
      ends4 = Unsqueeze (ends, axes123)
      span_v = Unsqueeze (span, axes013)
      exists = Less (span_v, ends4)
      values = Where (exists, values_all, zero_x)

      q_shape = Concat <axis = 0> (batch, steps, kv_heads, group, head_dim)
      q5 = Reshape (q, q_shape)
      q_t = Transpose <perm = [0, 2, 3, 1, 4]> (q5)
      q_scaled = Mul (q_t, scale_q)
      rows = Mul (group, steps)
      q_rows = Concat <axis = 0> (batch, kv_heads, rows, head_dim)
      q4 = Reshape (q_scaled, q_rows)
      keys_t = Transpose <perm = [0, 1, 3, 2]> (keys)
      raw = MatMul (q4, keys_t)
      score_shape = Concat <axis = 0> (batch, kv_heads, group, steps, context)
      raw5 = Reshape (raw, score_shape)
      position3 = Unsqueeze (position, minus1)
      span3 = Unsqueeze (span, axes01)
      causal = LessOrEqual (span3, position3)
      ends3 = Unsqueeze (ends, axes12)
      written = Less (span3, ends3)
      seen = And (causal, written)
      seen5 = Unsqueeze (seen, axes12)
      lowest_q = CastLike (lowest, q)
      masked = Where (seen5, raw5, lowest_q)
      weights = Softmax <axis = -1> (masked)
      weight_shape = Concat <axis = 0> (batch, kv_heads, rows, context)
      weights4 = Reshape (weights, weight_shape)
      mixed = MatMul (weights4, values)
      mixed_shape = Concat <axis = 0> (batch, kv_heads, group, steps, head_dim)
      mixed5 = Reshape (mixed, mixed_shape)
      mixed_t = Transpose <perm = [0, 3, 1, 2, 4]> (mixed5)
      y_shape = Shape (q)
      y = Reshape (mixed_t, y_shape)
    """


def reference(
    q: Array,
    k: Array,
    v: Array,
    key_cache: Array,
    value_cache: Array,
    slots: Index,
    past: Index,
    lengths: Index,
    scale: float,
) -> tuple[Array, Array, Array]:
    """One row, head and query at a time. Shapes as in the schema; returns ``(y, key_cache_out, value_cache_out)``."""
    kv_heads, _, head_dim = key_cache.shape[1:]
    group = q.shape[2] // (kv_heads * head_dim)
    keys, values = key_cache.copy(), value_cache.copy()
    y = np.zeros_like(q)
    for row, slot in enumerate(slots):
        p, n = int(past[row]), int(lengths[row])
        keys[slot, :, p : p + n] = k[row, :n].reshape(n, kv_heads, head_dim).transpose(1, 0, 2)
        values[slot, :, p : p + n] = v[row, :n].reshape(n, kv_heads, head_dim).transpose(1, 0, 2)
        for t in range(n):
            queries = q[row, t].reshape(kv_heads, group, head_dim)
            seen = p + t + 1
            for h in range(kv_heads):
                scores = queries[h] @ keys[slot, h, :seen].T * scale
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                at = h * group * head_dim
                y[row, t, at : at + group * head_dim] = (weights @ values[slot, h, :seen]).reshape(-1)
    return y, keys, values
