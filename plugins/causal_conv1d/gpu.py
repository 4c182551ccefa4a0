# SPDX-License-Identifier: Apache-2.0
"""``CausalConv1d`` on a GPU; see schema.py.

A program is a block of channels of one row and some of its new tokens. Steps and prompts are two launches of one
function, with few and with many tokens a program. Only the program of a row's first tokens reads the slot and writes
it, so that the state can be updated in place: all that the others need lies in the new tokens.
"""

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl

from nemo_build.plugins.gpu.kernel import Kernel, Tensor, ceil_div, power_of_two
from nemo_build.plugins.gpu.pending import stays_pending

TYPES = ("float32", "float16", "bfloat16")
PROMPT_TOKENS = 32
"""Tokens of a program for prompts."""


@triton.jit
def causal_conv1d(
    x,
    weight,
    bias,
    state,
    slots,
    past,
    accepted,
    lengths,
    steps,
    y,
    state_out,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    RING: tl.constexpr,
    BLOCK_TIME: tl.constexpr,
    BLOCK_CHANNELS: tl.constexpr,
    BLOCK_KEEP: tl.constexpr,
    BLOCK_RING: tl.constexpr,
):
    """The convolution of ``BLOCK_TIME`` tokens; the first program of a row also moves its window and its ring.

    Time counts from the first new token, so that -1 is the last token of the window. ``BLOCK_TIME`` is at least
    ``WIDTH - 1``: other programs than the first need nothing of the window.
    """
    KEEP: tl.constexpr = WIDTH - 1
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    first = tl.program_id(2) * BLOCK_TIME
    n = tl.load(lengths + row).to(tl.int32)
    if first >= n:
        return
    done = tl.load(accepted + row).to(tl.int32)
    oldest = tl.where(tl.load(past + row) == done, KEEP, 0)  # a new sequence has no window
    slot = tl.load(slots + row) * (KEEP + RING) * CHANNELS
    there = channel < CHANNELS
    tokens = x + row.to(tl.int64) * steps * CHANNELS + channel

    time = first + tl.arange(0, BLOCK_TIME)
    sums = tl.zeros((BLOCK_TIME, BLOCK_CHANNELS), tl.float32)
    if bias is not None:
        sums += tl.load(bias + channel, there, 0.0)[None, :]
    for tap in tl.static_range(WIDTH):
        at = time + (tap - KEEP)
        value = _token(tokens, state + slot + channel, at, n, done, oldest, there, CHANNELS, KEEP)
        sums += value.to(tl.float32) * tl.load(weight + channel * WIDTH + tap, there, 0.0)[None, :]
    result = sums / (1.0 + tl.exp(-sums))
    out = y + row.to(tl.int64) * steps * CHANNELS + channel
    inside = (time < n)[:, None] & there[None, :]
    tl.store(out[None, :] + time[:, None].to(tl.int64) * CHANNELS, result.to(y.dtype.element_ty), inside)

    if first == 0:
        stays = stays_pending(n, RING)
        kept = tl.arange(0, BLOCK_KEEP)
        window_at = kept - KEEP + tl.where(stays, 0, n)
        window = _token(tokens, state + slot + channel, window_at, n, done, oldest, there, CHANNELS, KEEP)
        tl.debug_barrier()  # other threads of the program may still be reading what is written now
        target = state_out + slot + channel
        mine = (kept < KEEP)[:, None] & there[None, :]
        tl.store(target[None, :] + kept[:, None] * CHANNELS, window, mine)
        if stays:
            pending = tl.arange(0, BLOCK_RING)
            drafted = (pending < n)[:, None] & there[None, :]
            new = tl.load(tokens[None, :] + pending[:, None] * CHANNELS, drafted, 0.0)
            ring = target + KEEP * CHANNELS
            tl.store(ring[None, :] + pending[:, None] * CHANNELS, new, drafted)


@triton.jit
def _token(tokens, state, at, n, done, oldest, there, CHANNELS: tl.constexpr, KEEP: tl.constexpr):
    """Inputs at some times; before zero they are the slot's, after ``done`` of its pending tokens are accepted.

    Of the slot, rows before ``oldest`` count as zero.
    """
    new = (at >= 0) & (at < n)
    fresh = tl.load(tokens[None, :] + at[:, None].to(tl.int64) * CHANNELS, new[:, None] & there[None, :], 0.0)
    place = at + KEEP + done
    old = (at < 0) & (at >= -KEEP) & (place >= oldest)
    stored = tl.load(state[None, :] + place[:, None] * CHANNELS, old[:, None] & there[None, :], 0.0)
    return tl.where(new[:, None], fresh, stored)


def kernels(attributes: Mapping[str, Any], dims: Mapping[str, int]) -> list[Kernel]:
    """A launch for steps and one for prompts, for each type of activations.

    Weight and bias are float32: a build converts these few numbers.

    Args:
        attributes: The op has none.
        dims: ``channels``, ``width`` (taps), ``pending``, and ``bias``: 1 if the node has one, else 0.
    """
    del attributes
    return [_kernel(dims, name, dtype) for dtype in TYPES for name in ("step", "prompt")]


def _kernel(dims: Mapping[str, int], name: str, dtype: str) -> Kernel:
    channels, width, ring = dims["channels"], dims["width"], dims["pending"]
    tokens = power_of_two(ring if name == "step" else PROMPT_TOKENS, width - 1)
    block = min(power_of_two(channels), 256 if name == "step" else 128)
    state = ("slots", width - 1 + ring, channels)
    weights = [Tensor("weight", "float32", (channels, 1, width))]
    weights += [Tensor("bias", "float32", (channels,))] if dims["bias"] else []
    return Kernel(
        op="CausalConv1d",
        name=name,
        types={"T": dtype},
        function=causal_conv1d,
        inputs=(
            Tensor("x", dtype, ("batch", "steps", channels)),
            *weights,
            Tensor("state", dtype, state),
            *(Tensor(n, "int64", ("batch",)) for n in ("slots", "past", "accepted", "lengths")),
        ),
        sizes=("steps",),
        outputs=(
            Tensor("y", dtype, ("batch", "steps", channels)),
            Tensor("state_out", dtype, state, alias="state"),
        ),
        constexprs={
            "CHANNELS": channels,
            "WIDTH": width,
            "RING": ring,
            "BLOCK_TIME": tokens,
            "BLOCK_CHANNELS": block,
            "BLOCK_KEEP": power_of_two(width - 1),
            "BLOCK_RING": power_of_two(ring),
            **({} if dims["bias"] else {"bias": None}),
        },
        grid=lambda sizes: (sizes["batch"], ceil_div(channels, block), ceil_div(sizes["steps"], tokens)),
        per_token=name == "step",
    )


KERNELS = kernels({}, {"channels": 6144, "width": 4, "pending": 8, "bias": 1})
