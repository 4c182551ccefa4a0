# SPDX-License-Identifier: Apache-2.0
"""Reference of ``SelectiveScan``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.state import stays_pending

Array = NDArray[Any]
Index = NDArray[np.int64]


def function(attributes: Mapping[str, Any], present: Collection[str]) -> str:
    """The body in standard ops: one ONNX Scan over [pending | new tokens].

    Tokens that do not count (rejected, or past a row's length) get d = 0 and x = 0, which leaves a state as
    it is. The Scan carries the running state and the committed one; the latter follows the former while
    the token is one that this step commits.
    """
    return """
      zero = Constant <value_int = 0> ()
      one = Constant <value_int = 1> ()
      zero1 = Constant <value_ints = [0]> ()
      one1 = Constant <value_ints = [1]> ()
      minus1 = Constant <value_ints = [-1]> ()
      axes12 = Constant <value_ints = [1, 2]> ()
      axes123 = Constant <value_ints = [1, 2, 3]> ()
      axes34 = Constant <value_ints = [3, 4]> ()
      axes234 = Constant <value_ints = [2, 3, 4]> ()
      lo = Constant <value_float : float = @dt_min> ()
      hi = Constant <value_float : float = @dt_max> ()
      lo_x = CastLike (lo, x)
      hi_x = CastLike (hi, x)
      zero_x = CastLike (zero, x)

      batch = Shape <start = 0, end = 1> (x)
      steps = Shape <start = 1, end = 2> (x)
      inner = Shape <start = 2, end = 3> (x)
      heads = Shape <start = 1, end = 2> (state)
      head_dim = Shape <start = 2, end = 3> (state)
      width = Shape <start = 3, end = 4> (state)
      group_width = Shape <start = 2, end = 3> (b)
      groups = Div (group_width, width)
      heads_per_group = Div (heads, groups)
      ring = Shape <start = 1, end = 2> (pending)
      total = Add (ring, steps)
      steps0 = Squeeze (steps, zero1)
      ring0 = Squeeze (ring, zero1)
      total0 = Squeeze (total, zero1)

      time = Range (zero, steps0, one)
      ring_time = Range (zero, ring0, one)
      lengths2 = Unsqueeze (lengths, one1)
      accepted2 = Unsqueeze (accepted, one1)
      valid = Less (time, lengths2)
      valid3 = Unsqueeze (valid, minus1)
      kept = Less (ring_time, accepted2)
      kept3 = Unsqueeze (kept, minus1)

      bias = CastLike (dt_bias, x)
      raw = Add (dt, bias)
      soft = Softplus (raw)
      d = Clip (soft, lo_x, hi_x)
      new_all = Concat <axis = -1> (x, b, d)
      new = Where (valid3, new_all, zero_x)
      old = Gather <axis = 0> (pending, slots)
      old_kept = Where (kept3, old, zero_x)
      seq = Concat <axis = 1> (old_kept, new)
      seq_t = Transpose <perm = [1, 0, 2]> (seq)
      sizes = Concat <axis = 0> (inner, group_width, heads)
      x_t, b_t, d_t = Split <axis = -1> (seq_t, sizes)

      c_pad_shape = Concat <axis = 0> (batch, ring, group_width)
      c_pad = Expand (zero_x, c_pad_shape)
      c_seq = Concat <axis = 1> (c_pad, c)
      c_t = Transpose <perm = [1, 0, 2]> (c_seq)
      grouped = Concat <axis = 0> (total, batch, groups, one1, width)
      per_head = Concat <axis = 0> (total, batch, groups, heads_per_group, width)
      b_shape = Concat <axis = 0> (total, batch, heads, one1, width)
      c_shape = Concat <axis = 0> (total, batch, heads, width, one1)
      x_shape = Concat <axis = 0> (total, batch, heads, head_dim, one1)
      b_g = Reshape (b_t, grouped)
      b_h = Expand (b_g, per_head)
      b_scan = Reshape (b_h, b_shape)
      c_g = Reshape (c_t, grouped)
      c_h = Expand (c_g, per_head)
      c_scan = Reshape (c_h, c_shape)
      a_exp = CastLike (a_log, x)
      a_pos = Exp (a_exp)
      a = Neg (a_pos)
      da = Mul (d_t, a)
      decay = Exp (da)
      decay_scan = Unsqueeze (decay, axes34)
      x_heads = Reshape (x_t, x_shape)
      d_scan = Unsqueeze (d_t, axes34)
      dx_scan = Mul (x_heads, d_scan)

      all_time = Range (zero, total0, one)
      in_ring = Less (all_time, ring)
      in_ring2 = Unsqueeze (in_ring, one1)
      beyond = Greater (lengths, ring)
      single = Equal (lengths, one)
      long = Or (beyond, single)
      commit = Or (in_ring2, long)
      commit_scan = Unsqueeze (commit, axes234)

      stored = Gather <axis = 0> (state, slots)
      is_new = Equal (past, accepted)
      is_new4 = Unsqueeze (is_new, axes123)
      h0 = Where (is_new4, zero_x, stored)
      h_end, committed, y_scan = Scan <num_scan_inputs = 5, body = step
        (h, done, decay_i, dx_i, b_i, c_i, commit_i) => (h_next, done_next, y_i) {
          faded = Mul (h, decay_i)
          added = Mul (dx_i, b_i)
          h_next = Add (faded, added)
          done_next = Where (commit_i, h_next, done)
          y_i = MatMul (h_next, c_i)
        }> (h0, h0, decay_scan, dx_scan, b_scan, c_scan, commit_scan)

      y_new = Slice (y_scan, ring, total, zero1)
      y_shape = Concat <axis = 0> (steps, batch, inner)
      y_flat = Reshape (y_new, y_shape)
      y_main = Transpose <perm = [1, 0, 2]> (y_flat)
      x4_shape = Concat <axis = 0> (batch, steps, heads, head_dim)
      x4 = Reshape (x, x4_shape)
      skip = CastLike (d_skip, x)
      skip2 = Unsqueeze (skip, one1)
      skipped = Mul (x4, skip2)
      x_full = Shape (x)
      skipped3 = Reshape (skipped, x_full)
      y = Add (y_main, skipped3)

      active = Greater (lengths, zero)
      slots_on = Compress <axis = 0> (slots, active)
      slots_on2 = Unsqueeze (slots_on, one1)
      committed_on = Compress <axis = 0> (committed, active)
      state_out = ScatterND (state, slots_on2, committed_on)
      features = Shape <start = 2, end = 3> (pending)
      tail_shape = Concat <axis = 0> (batch, ring, features)
      tail = Expand (zero_x, tail_shape)
      padded = Concat <axis = 1> (new, tail)
      head = Slice (padded, zero1, ring, one1)
      is_new_token = Less (ring_time, lengths2)
      short = Not (long)
      short2 = Unsqueeze (short, one1)
      is_written = And (is_new_token, short2)
      is_written3 = Unsqueeze (is_written, minus1)
      next_ring = Where (is_written3, head, old)
      next_on = Compress <axis = 0> (next_ring, active)
      pending_out = ScatterND (pending, slots_on2, next_on)
    """


def reference(
    x: Array,
    dt: Array,
    b: Array,
    c: Array,
    a_log: Array,
    d_skip: Array,
    dt_bias: Array,
    state: Array,
    pending: Array,
    slots: Index,
    past: Index,
    accepted: Index,
    lengths: Index,
    dt_min: float = 0.0,
    dt_max: float = float("inf"),
) -> tuple[Array, Array, Array]:
    """One row and one token at a time. Shapes as in the schema; returns ``(y, state_out, pending_out)``."""
    heads, head_dim, width = state.shape[1:]
    groups = b.shape[2] // width
    ring = pending.shape[1]
    a = -np.exp(a_log.astype(x.dtype))
    d = np.clip(np.logaddexp(0, dt + dt_bias.astype(x.dtype)), dt_min, dt_max).astype(x.dtype)
    tokens = np.concatenate([x, b, d], axis=-1)
    y = np.zeros_like(x)
    state_out, pending_out = state.copy(), pending.copy()

    def advance(h: Array, token: Array) -> Array:
        x_i, b_i, d_i = np.split(token, [heads * head_dim, heads * head_dim + groups * width])
        b_heads = np.repeat(b_i.reshape(groups, width), heads // groups, axis=0)
        update = (d_i[:, None] * x_i.reshape(heads, head_dim))[:, :, None] * b_heads[:, None, :]
        faded: Array = h * np.exp(d_i * a)[:, None, None]
        advanced: Array = faded + update
        return advanced

    for row, slot in enumerate(slots):
        n = int(lengths[row])
        if n == 0:
            continue
        h = np.zeros_like(state[slot]) if past[row] == accepted[row] else state[slot]
        for token in pending[slot, : accepted[row]]:
            h = advance(h, token)
        committed = h
        for t in range(n):
            h = advance(h, tokens[row, t])
            c_heads = np.repeat(c[row, t].reshape(groups, width), heads // groups, axis=0)
            skip = d_skip.astype(x.dtype)[:, None] * x[row, t].reshape(heads, head_dim)
            y[row, t] = (np.einsum("hpn,hn->hp", h, c_heads) + skip).reshape(-1)
        state_out[slot] = committed if stays_pending(n, ring) else h
        if stays_pending(n, ring):
            pending_out[slot, :n] = tokens[row, :n]
    return y, state_out, pending_out
