# SPDX-License-Identifier: Apache-2.0
"""Reference of ``CausalConv1d``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.state import stays_pending

Array = NDArray[Any]
Index = NDArray[np.int64]


def function(attributes: Mapping[str, Any], present: Collection[str]) -> str:
    """The body in standard ops."""
    bias = "b = CastLike (bias, x)\n conv = Add (sums, b)" if "bias" in present else "conv = Identity (sums)"
    return f"""
      zero = Constant <value_int = 0> ()
      one = Constant <value_int = 1> ()
      axis0 = Constant <value_ints = [0]> ()
      axis1 = Constant <value_ints = [1]> ()
      last = Constant <value_ints = [-1]> ()
      zero_f = CastLike (zero, x)

      width = Shape <start = 2, end = 3> (weight)
      taps = Squeeze (width, axis0)
      keep = Sub (taps, one)
      rows = Shape <start = 1, end = 2> (state)
      rows0 = Squeeze (rows, axis0)
      pending = Sub (rows0, keep)
      steps = Shape <start = 1, end = 2> (x)
      steps0 = Squeeze (steps, axis0)
      keep1 = Unsqueeze (keep, axis0)
      pending1 = Unsqueeze (pending, axis0)

      old = Gather <axis = 0> (state, slots)
      is_new = Equal (past, accepted)
      is_new2 = Unsqueeze (is_new, axis1)
      row_range = Range (zero, rows0, one)
      in_window = Less (row_range, keep)
      is_blank = And (is_new2, in_window)
      is_blank3 = Unsqueeze (is_blank, last)
      kept = Where (is_blank3, zero_f, old)
      window_range = Range (zero, keep, one)
      accepted2 = Unsqueeze (accepted, axis1)
      window_at = Add (accepted2, window_range)
      window_at3 = Unsqueeze (window_at, last)
      window = GatherND <batch_dims = 1> (kept, window_at3)

      time = Range (zero, steps0, one)
      lengths2 = Unsqueeze (lengths, axis1)
      valid = Less (time, lengths2)
      valid3 = Unsqueeze (valid, last)
      fresh = Where (valid3, x, zero_f)
      seq = Concat <axis = 1> (window, fresh)

      time2 = Unsqueeze (time, axis1)
      tap_range = Range (zero, taps, one)
      at = Add (time2, tap_range)
      taken = Gather <axis = 1> (seq, at)
      w = CastLike (weight, x)
      w2 = Squeeze (w, axis1)
      wt = Transpose <perm = [1, 0]> (w2)
      products = Mul (taken, wt)
      axis2 = Constant <value_ints = [2]> ()
      sums = ReduceSum <keepdims = 0> (products, axis2)
      {bias}
      gate = Sigmoid (conv)
      y = Mul (conv, gate)

      beyond = Greater (lengths, pending)
      single = Equal (lengths, one)
      commit = Or (beyond, single)
      start = Where (commit, lengths, zero)
      start2 = Unsqueeze (start, axis1)
      next_at = Add (start2, window_range)
      next_at3 = Unsqueeze (next_at, last)
      next_window = GatherND <batch_dims = 1> (seq, next_at3)
      batch = Shape <start = 0, end = 1> (x)
      channels = Shape <start = 2, end = 3> (x)
      tail_shape = Concat <axis = 0> (batch, pending1, channels)
      tail = Expand (zero_f, tail_shape)
      padded = Concat <axis = 1> (fresh, tail)
      new_pending = Slice (padded, axis0, pending1, axis1)
      old_pending = Slice (old, keep1, rows, axis1)
      ring_range = Range (zero, pending, one)
      is_new_token = Less (ring_range, lengths2)
      short = Not (commit)
      short2 = Unsqueeze (short, axis1)
      is_written = And (is_new_token, short2)
      is_written3 = Unsqueeze (is_written, last)
      next_pending = Where (is_written3, new_pending, old_pending)
      next_rows = Concat <axis = 1> (next_window, next_pending)
      active = Greater (lengths, zero)
      slots_on = Compress <axis = 0> (slots, active)
      slots_on2 = Unsqueeze (slots_on, axis1)
      rows_on = Compress <axis = 0> (next_rows, active)
      state_out = ScatterND (state, slots_on2, rows_on)
    """


def reference(
    x: Array,
    weight: Array,
    bias: Array | None,
    state: Array,
    slots: Index,
    past: Index,
    accepted: Index,
    lengths: Index,
) -> tuple[Array, Array]:
    """One row and one token at a time. Shapes as in the schema; returns ``(y, state_out)``."""
    keep = weight.shape[2] - 1
    pending = state.shape[1] - keep
    w = weight[:, 0].astype(x.dtype).T
    b = 0 if bias is None else bias.astype(x.dtype)
    y = np.zeros_like(x)
    state_out = state.copy()
    for row, slot in enumerate(slots):
        n, a = int(lengths[row]), int(accepted[row])
        if n == 0:
            continue
        old = state[slot].copy()
        if past[row] == a:
            old[:keep] = 0
        window = old[a : a + keep]
        seq = np.concatenate([window, x[row, :n]])
        for t in range(n):
            v = (seq[t : t + keep + 1] * w).sum(axis=0) + b
            y[row, t] = v / (1 + np.exp(-v))
        if stays_pending(n, pending):
            state_out[slot, :keep] = window
            state_out[slot, keep : keep + n] = x[row, :n]
        else:
            state_out[slot, :keep] = seq[n:]
    return y, state_out
