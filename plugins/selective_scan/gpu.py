# SPDX-License-Identifier: Apache-2.0
"""``SelectiveScan`` on a GPU; see schema.py.

``step`` takes the tokens of a row in turn, with some rows of one head's state in the registers of a program, and reads
and writes the state once: for decoding and for verifying drafts. The four launches of ``gpu_chunks.py`` compute the
same for long prompts. Either is followed by ``keep``, which makes the new tokens of a row pending. It is a launch of
its own because all heads of a group read what it overwrites.

The state, the ring of pending tokens and parameters are float32, whatever the activations are: a state gathers
rounding errors over a whole sequence, and a time step that were rounded in the ring would make a committed draft differ
from a decoded token.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import triton
import triton.language as tl

from nemo_build.plugins.gpu.kernel import Ceil, Kernel, Tensor, ceil_div, power_of_two
from nemo_build.plugins.gpu.pending import stays_pending
from nemo_build.plugins.selective_scan import gpu_chunks
from nemo_build.plugins.selective_scan.gpu_math import decay_rate, time_step

TYPES = ("float32", "float16", "bfloat16")
ELEMENTS = 4096
"""Elements of a state that a program has in its registers: 32 of each thread."""


@triton.jit
def step(
    x,
    dt,
    b,
    c,
    a_log,
    d_skip,
    dt_bias,
    state,
    pending,
    slots,
    past,
    accepted,
    lengths,
    steps,
    y,
    state_out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    RING: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Commit the accepted pending tokens of a row, then compute its new tokens; some rows of one head's state."""
    row, head = tl.program_id(0), tl.program_id(1)
    n = tl.load(lengths + row).to(tl.int32)
    if n == 0:
        return
    group = head // (HEADS // GROUPS)
    p = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_N)
    mine, wide = p < HEAD_DIM, column < WIDTH
    slot = tl.load(slots + row)
    done = tl.load(accepted + row).to(tl.int32)
    known = tl.where(tl.load(past + row) == done, 0, HEAD_DIM)  # a new sequence has no state
    stored = ((slot * HEADS + head) * HEAD_DIM + p[:, None]) * WIDTH + column[None, :]
    h = tl.load(state + stored, (p < known)[:, None] & wide[None, :], 0.0)
    rate = decay_rate(a_log, head)
    if RING > 0:
        FEATURES: tl.constexpr = HEADS * HEAD_DIM + GROUPS * WIDTH + HEADS
        for t in range(done):
            token = pending + (slot * RING + t) * FEATURES
            x_t = tl.load(token + head * HEAD_DIM + p, mine, 0.0)
            b_t = tl.load(token + HEADS * HEAD_DIM + group * WIDTH + column, wide, 0.0)
            h = _advance(h, tl.load(token + FEATURES - HEADS + head), rate, x_t, b_t)
    tl.debug_barrier()  # other threads may still be reading the state that is written now
    kept = mine[:, None] & wide[None, :]
    stays = stays_pending(n, RING)
    if stays:
        tl.store(state_out + stored, h, kept)
    skip, bias = tl.load(d_skip + head), tl.load(dt_bias + head)
    for t in range(n):
        token = row.to(tl.int64) * steps + t
        d = time_step(tl.load(dt + token * HEADS + head).to(tl.float32) + bias, LOW, HIGH)
        output = (token * HEADS + head) * HEAD_DIM + p
        x_t = tl.load(x + output, mine, 0.0).to(tl.float32)
        shared = (token * GROUPS + group) * WIDTH + column
        b_t = tl.load(b + shared, wide, 0.0).to(tl.float32)
        c_t = tl.load(c + shared, wide, 0.0).to(tl.float32)
        h = _advance(h, d, rate, x_t, b_t)
        y_t = tl.sum(h * c_t[None, :], axis=1) + skip * x_t
        tl.store(y + output, y_t.to(y.dtype.element_ty), mine)
    if not stays:
        tl.store(state_out + stored, h, kept)


@triton.jit
def _advance(h, d, rate, x_t, b_t):
    """h exp(d a) + d x B^T; the same operations for a new token and for a pending one."""
    return tl.fma(h, tl.exp(d * rate) + tl.zeros_like(h), (d * x_t)[:, None] * b_t[None, :])


@triton.jit
def keep(
    x,
    dt,
    b,
    dt_bias,
    pending,
    slots,
    lengths,
    after,
    steps,
    pending_out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    RING: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Make the new tokens of rows with 2 to K of them pending; some features (x | B | d) of one token.

    Of ``after`` and ``pending`` nothing is read. The former is the scan's y, which orders the two.
    """
    row, t = tl.program_id(0), tl.program_id(1)
    n = tl.load(lengths + row).to(tl.int32)
    if t >= n:
        return
    if not stays_pending(n, RING):
        return
    INNER: tl.constexpr = HEADS * HEAD_DIM
    SHARED: tl.constexpr = GROUPS * WIDTH
    feature = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    token = row.to(tl.int64) * steps + t
    at_b, head = feature - INNER, feature - INNER - SHARED
    of_d = (head >= 0) & (head < HEADS)
    value = tl.load(x + token * INNER + feature, feature < INNER, 0.0).to(tl.float32)
    value += tl.load(b + token * SHARED + at_b, (at_b >= 0) & (head < 0), 0.0).to(tl.float32)
    raw = tl.load(dt + token * HEADS + head, of_d, 0.0).to(tl.float32) + tl.load(dt_bias + head, of_d, 0.0)
    value = tl.where(of_d, time_step(raw, LOW, HIGH), value)
    target = (tl.load(slots + row) * RING + t) * (INNER + SHARED + HEADS)
    tl.store(pending_out + target + feature, value, head < HEADS)


def kernels(attributes: Mapping[str, Any], dims: Mapping[str, int]) -> list[Kernel]:
    """``step``, ``keep`` and the four launches over chunks, for each type of activations.

    Args:
        attributes: ``dt_min`` and ``dt_max``.
        dims: ``heads``, ``head_dim``, ``width`` (state size), ``groups``, ``pending``, and ``chunk``, a power of two
            from 16 on. Without pending tokens (0) there is no ``keep``, and no kernel has the parameter ``pending``.
    """
    low, high = attributes.get("dt_min", 0.0), attributes.get("dt_max", float("inf"))
    clamp = {"LOW": float(low), "HIGH": float(high)}
    made = []
    for dtype in TYPES:
        node = _Node(dims, clamp, dtype)
        made += [node.step(), *([node.keep()] if node.ring else []), *node.chunks()]
    return made


class _Node:
    """The launches for one type of activations."""

    def __init__(self, dims: Mapping[str, int], clamp: dict[str, float], dtype: str) -> None:
        heads, head_dim, width, groups = (dims[d] for d in ("heads", "head_dim", "width", "groups"))
        self.heads, self.head_dim, self.width, self.ring = heads, head_dim, width, dims["pending"]
        self.chunk, self.clamp, self.dtype = dims["chunk"], clamp, dtype
        self.precision = "tf32x3" if dtype == "float32" else "tf32"
        self.widths = {"HEADS": heads, "HEAD_DIM": head_dim, "WIDTH": width, "GROUPS": groups}
        tokens = {"x": heads * head_dim, "dt": heads, "b": groups * width, "c": groups * width}
        states = ("slots", heads, head_dim, width)
        ring = ("slots", self.ring, sum(tokens.values()) - tokens["c"])
        chunked = ("batch", "chunks", heads)
        self.tensors = {
            **{name: Tensor(name, dtype, ("batch", "steps", size)) for name, size in tokens.items()},
            **{name: Tensor(name, "float32", (heads,)) for name in ("a_log", "d_skip", "dt_bias")},
            **{name: Tensor(name, "int64", ("batch",)) for name in ("slots", "past", "accepted", "lengths")},
            "state": Tensor("state", "float32", states),
            "state_out": Tensor("state_out", "float32", states, alias="state"),
            "pending": Tensor("pending", "float32", ring),
            "pending_out": Tensor("pending_out", "float32", ring, alias="pending"),
            **{name: Tensor(name, dtype, ("batch", "steps", tokens["x"])) for name in ("y", "after")},
            **{name: Tensor(name, "float32", (*chunked, self.chunk)) for name in ("d", "decays")},
            **{name: Tensor(name, "float32", (*chunked, head_dim, width)) for name in ("states", "entering")},
        }

    def _kernel(self, name: str, function: Any, inputs: str, outputs: str, sizes: str, **how: Any) -> Kernel:
        """A launch whose tensors and sizes are given as words."""
        names, constexprs = inputs.split(), how.pop("constexprs")
        if "pending" in names and not self.ring:
            names.remove("pending")
            constexprs["pending"] = None
        return Kernel(
            op="SelectiveScan",
            name=name,
            stage=how.pop("stage", name),
            types={"T": self.dtype},
            function=function,
            inputs=tuple(self.tensors[n] for n in names),
            sizes=tuple(sizes.split()),
            outputs=tuple(self.tensors[n] for n in outputs.split()),
            constexprs=constexprs,
            **how,
        )

    def step(self) -> Kernel:
        """All tokens in turn."""
        heads, columns = self.heads, power_of_two(self.width)
        rows = min(power_of_two(self.head_dim), max(ELEMENTS // columns, 1))
        parts = ceil_div(self.head_dim, rows)
        return self._kernel(
            "step",
            step,
            "x dt b c a_log d_skip dt_bias state pending slots past accepted lengths",
            "y state_out",
            "steps",
            constexprs={**self.widths, **self.clamp, "RING": self.ring, "BLOCK_P": rows, "BLOCK_N": columns},
            grid=lambda sizes: (sizes["batch"], heads, parts),
            per_token=True,
        )

    def keep(self) -> Kernel:
        """The new tokens into the ring."""
        ring, block = self.ring, 1024
        features = self.tensors["pending"].shape[2]
        assert isinstance(features, int)
        return self._kernel(
            "keep",
            keep,
            "x dt b dt_bias pending slots lengths after",
            "pending_out",
            "steps",
            constexprs={**self.widths, **self.clamp, "RING": ring, "BLOCK": block},
            grid=lambda sizes: (sizes["batch"], ring, ceil_div(features, block)),
            per_token=True,
        )

    def chunks(self) -> list[Kernel]:
        """The launches over chunks, in order, and variants with fewer tokens at a time, which need less memory."""
        states, outputs = self._chunk_states(""), self._chunk_outputs("")
        small = [self._chunk_states("_small"), self._chunk_outputs("_small")]
        launches = [self._chunk_decays(), states, self._pass_states(), outputs]
        pairs = zip(small, (states, outputs), strict=True)
        return launches + [
            k for k, usual in pairs if k.constexprs["BLOCK_TIME"] < usual.constexprs["BLOCK_TIME"]
        ]

    def _chunk_decays(self) -> Kernel:
        heads, chunk = self.heads, self.chunk
        block = min(power_of_two(heads), 8)
        kernel = self._kernel(
            "chunk_decays",
            gpu_chunks.chunk_decays,
            "dt a_log dt_bias lengths",
            "d decays",
            "steps",
            constexprs={"HEADS": heads, "CHUNK": chunk, **self.clamp, "BLOCK_HEADS": block},
            grid=lambda sizes: (sizes["batch"], ceil_div(sizes["steps"], chunk), ceil_div(heads, block)),
        )
        shape = ("batch", Ceil("steps", chunk), heads, chunk)  # where the number of chunks comes from
        return replace(kernel, outputs=tuple(replace(t, shape=shape) for t in kernel.outputs))

    def _chunk_states(self, variant: str) -> Kernel:
        heads, columns = self.heads, min(power_of_two(self.width, 16), 128)
        parts = ceil_div(self.width, columns)
        return self._kernel(
            f"chunk_states{variant}",
            gpu_chunks.chunk_states,
            "x b d decays lengths",
            "states",
            "steps chunks",
            stage="chunk_states",
            constexprs=self._dots(columns, 32, variant),
            grid=lambda sizes: (heads * sizes["batch"], sizes["chunks"], parts),
        )

    def _pass_states(self) -> Kernel:
        heads, elements = self.heads, self.head_dim * self.width
        block = min(power_of_two(elements), 512)
        return self._kernel(
            "pass_states",
            gpu_chunks.pass_states,
            "states decays a_log state pending slots past accepted lengths",
            "entering state_out",
            "chunks",
            constexprs={**self.widths, "RING": self.ring, "CHUNK": self.chunk, "BLOCK": block},
            grid=lambda sizes: (heads * sizes["batch"], ceil_div(elements, block), 1),
        )

    def _chunk_outputs(self, variant: str) -> Kernel:
        heads, constexprs = self.heads, self._dots(power_of_two(self.width, 16), 16, variant)
        parts = self.chunk // constexprs["BLOCK_TIME"]
        return self._kernel(
            f"chunk_outputs{variant}",
            gpu_chunks.chunk_outputs,
            "x b c d_skip d decays entering lengths",
            "y",
            "steps chunks",
            stage="chunk_outputs",
            constexprs=constexprs,
            grid=lambda sizes: (heads * sizes["batch"], sizes["chunks"], parts),
        )

    def _dots(self, columns: int, tokens_float32: int, variant: str) -> dict[str, Any]:
        """Constants of a launch with dot products, whose blocks have 16 rows and columns at least.

        Float32 takes three products for each, and fewer tokens at a time so that registers suffice.
        """
        tokens = tokens_float32 if self.dtype == "float32" else 64
        tokens = min(self.chunk, max(tokens // 2, 16) if variant else tokens)
        blocks = {"BLOCK_P": power_of_two(self.head_dim, 16), "BLOCK_N": columns, "BLOCK_TIME": tokens}
        return {**self.widths, "CHUNK": self.chunk, "PRECISION": self.precision, **blocks}


KERNELS = kernels(
    {"dt_min": 0.001},
    {"heads": 64, "head_dim": 64, "width": 128, "groups": 8, "pending": 8, "chunk": 128},
)
