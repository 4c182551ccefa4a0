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
    consumer. Only the positions that some row needs are gathered. Values that no query of a row sees may be
    anything; they are replaced, because a weight of zero does not hide a NaN.
    """
    q_used, k_used, rotation = "q", "k", ""
    if "cos" in present:
        q_used, k_used, rotation = "q_rotated", "k_rotated", ROTATION + _rotate("q") + _rotate("k")
    is_past = "And (is_written, is_not_later)" if attributes.get("causal", 1) else "Identity (is_written)"
    is_read, is_seen = "is_read = Identity (is_before_end)", "is_seen = Identity (is_past)"
    if attributes.get("window", 0):
        is_read, is_seen = IS_READ_IN_WINDOW, IS_SEEN_IN_WINDOW
    softmax = SINKS if "sinks" in present else "weights = Softmax <axis = -1> (masked)"
    return f"""
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
{rotation}
      k3 = Reshape ({k_used}, token_shape)
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
      is_before_end = Less (span_v, ends4)
      {is_read}
      values = Where (is_read, values_all, zero_x)

      q_shape = Concat <axis = 0> (batch, steps, kv_heads, group, head_dim)
      q5 = Reshape ({q_used}, q_shape)
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
      ends3 = Unsqueeze (ends, axes12)
      is_written = Less (span3, ends3)
      is_not_later = LessOrEqual (span3, position3)
      is_past = {is_past}
      {is_seen}
      seen5 = Unsqueeze (is_seen, axes12)
      lowest_q = CastLike (lowest, q)
      masked = Where (seen5, raw5, lowest_q)
      {softmax}
      weight_shape = Concat <axis = 0> (batch, kv_heads, rows, context)
      weights4 = Reshape (weights, weight_shape)
      mixed = MatMul (weights4, values)
      mixed_shape = Concat <axis = 0> (batch, kv_heads, group, steps, head_dim)
      mixed5 = Reshape (mixed, mixed_shape)
      mixed_t = Transpose <perm = [0, 3, 1, 2, 4]> (mixed5)
      y_shape = Shape (q)
      y = Reshape (mixed_t, y_shape)
    """


ROTATION = """
      half_rotary = Shape <start = 1, end = 2> (cos)
      rotary = Add (half_rotary, half_rotary)
      safe_position = Where (valid, position, zero)
      axis2 = Constant <value_ints = [2]> ()
      heads_shape = Concat <axis = 0> (bl, minus1, head_dim)
      cos_at = Gather <axis = 0> (cos, safe_position)
      sin_at = Gather <axis = 0> (sin, safe_position)
      cos3 = CastLike (cos_at, q)
      sin3 = CastLike (sin_at, q)
      cos4 = Unsqueeze (cos3, axis2)
      sin4 = Unsqueeze (sin3, axis2)
"""


IS_READ_IN_WINDOW = """
      window = Constant <value_int : int = @window> ()
      first_hidden = Sub (past, window)
      first_hidden4 = Unsqueeze (first_hidden, axes123)
      is_in_window = Greater (span_v, first_hidden4)
      is_read = And (is_before_end, is_in_window)
"""

IS_SEEN_IN_WINDOW = """
      hidden3 = Sub (position3, window)
      is_recent = Greater (span3, hidden3)
      is_seen = And (is_past, is_recent)
"""

SINKS = """
      sinks_q = CastLike (sinks, q)
      sink_heads = Concat <axis = 0> (one1, kv_heads, group, one1, one1)
      sinks5 = Reshape (sinks_q, sink_heads)
      sink_shape = Concat <axis = 0> (batch, kv_heads, group, steps, one1)
      sink_scores = Expand (sinks5, sink_shape)
      with_sinks = Concat <axis = -1> (masked, sink_scores)
      all_weights = Softmax <axis = -1> (with_sinks)
      weights = Slice (all_weights, zero1, context, minus1)
"""


def _rotate(x: str) -> str:
    """``x_rotated``: the first R components of each head of ``x`` rotated by position."""
    return f"""
      {x}_heads = Reshape ({x}, heads_shape)
      {x}_low = Slice ({x}_heads, zero1, half_rotary, minus1)
      {x}_high = Slice ({x}_heads, half_rotary, rotary, minus1)
      {x}_rest = Slice ({x}_heads, rotary, head_dim, minus1)
      {x}_low_cos = Mul ({x}_low, cos4)
      {x}_high_sin = Mul ({x}_high, sin4)
      {x}_high_cos = Mul ({x}_high, cos4)
      {x}_low_sin = Mul ({x}_low, sin4)
      {x}_low_out = Sub ({x}_low_cos, {x}_high_sin)
      {x}_high_out = Add ({x}_high_cos, {x}_low_sin)
      {x}_joined = Concat <axis = -1> ({x}_low_out, {x}_high_out, {x}_rest)
      {x}_flat_shape = Shape ({x})
      {x}_rotated = Reshape ({x}_joined, {x}_flat_shape)
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
    sinks: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    *,
    scale: float,
    window: int = 0,
    causal: int = 1,
) -> tuple[Array, Array, Array]:
    """One row, head and query at a time. Shapes as in the schema; returns ``(y, key_cache_out, value_cache_out)``."""
    kv_heads, _, head_dim = key_cache.shape[1:]
    group = q.shape[2] // (kv_heads * head_dim)
    keys, values = key_cache.copy(), value_cache.copy()
    y = np.zeros_like(q)
    for row, slot in enumerate(slots):
        p, n = int(past[row]), int(lengths[row])
        new_keys, new_values = (a[row, :n].reshape(n, kv_heads, head_dim) for a in (k, v))
        queries = q[row, :n].reshape(n, kv_heads * group, head_dim)
        if cos is not None and sin is not None:
            new_keys, queries = (_rotated(a, cos[p : p + n], sin[p : p + n]) for a in (new_keys, queries))
        keys[slot, :, p : p + n] = new_keys.transpose(1, 0, 2)
        values[slot, :, p : p + n] = new_values.transpose(1, 0, 2)
        for t in range(n):
            first = max(0, p + t - window + 1) if window else 0
            end = p + t + 1 if causal else p + n
            for h in range(kv_heads * group):
                scores = keys[slot, h // group, first:end] @ queries[t, h] * scale
                top = scores.max() if sinks is None else max(scores.max(), sinks[h].astype(q.dtype))
                weights = np.exp(scores - top)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[h].astype(q.dtype) - top))
                y[row, t, h * head_dim : (h + 1) * head_dim] = (
                    weights / total @ values[slot, h // group, first:end]
                )
    return y, keys, values


def _rotated(x: Array, cos: Array, sin: Array) -> Array:
    """``x`` [n, heads, D] with the first R components of each head rotated."""
    half = cos.shape[1]
    c, s = cos[:, None].astype(x.dtype), sin[:, None].astype(x.dtype)
    low, high, rest = np.split(x, [half, 2 * half], axis=2)
    return np.concatenate([low * c - high * s, high * c + low * s, rest], axis=2)
