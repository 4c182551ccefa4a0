# SPDX-License-Identifier: Apache-2.0
"""From one row of logits to one token.

The transforms are applied in this order, which is the order of Hugging Face's ``generate``:

1. repetition, presence and frequency penalties;
2. logit bias;
3. ``min_tokens`` (ids that would end the text are masked);
4. temperature;
5. top-k, top-p, min-p.

What is left is the *target distribution*. A token is drawn from it by inverse CDF over token ids with a
uniform number that depends on nothing but (seed, position, stream): the same request gives the same tokens
whatever else is in its batch, however its prompt is chunked, and with or without speculation.

Every row handled here is ``[V]``. Logits may hold ``-inf`` (grammar masks); a row with NaN, ``+inf`` or no
finite entry is a defect of the engine and raises :class:`NonFiniteLogitsError`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_build.runtime.params import SamplingParams

__all__ = [
    "NonFiniteLogitsError",
    "TokenCounts",
    "TokenLogprobs",
    "adjust_logits",
    "draw",
    "logprobs",
    "sample",
    "target_distribution",
    "uniform",
]

_MIN_TEMPERATURE = 1e-6
"""Below this the division overflows float32; at this value a gap of 1e-3 already has odds of e**-1000."""

_DRAW_BLOCK = 256
"""Tokens per block of :func:`draw`; the chosen token may depend on it in the last bit of ``u``."""


class NonFiniteLogitsError(RuntimeError):
    """The engine produced logits from which no token can be chosen (NaN, +inf, or all ``-inf``)."""


class TokenCounts:
    """Which tokens a sequence holds, and how often the output repeats each.

    Only the tokens that occur are stored, so that applying the penalties costs in proportion to the distinct
    tokens of the sequence, not to the vocabulary. :meth:`push` and :meth:`pop` are O(1): a draft is pushed to
    see the penalties it would cause, and popped when it is rejected.

    Args:
        prompt: Token ids of the prompt, ``[n]`` integers >= 0.
    """

    def __init__(self, prompt: ArrayLike | Sequence[int] = ()) -> None:
        distinct = np.unique(np.asarray(prompt, dtype=np.int64))
        # One slot per distinct token, those of the prompt first. A slot is never given back: after a pop its
        # count is 0, and the next push of the same token finds it again.
        self._slots = {token: slot for slot, token in enumerate(distinct.tolist())}
        self._num_prompt_slots = len(distinct)
        self._ids = distinct
        self._output = np.zeros(len(distinct), dtype=np.int32)
        self._history: list[int] = []

    def __len__(self) -> int:
        """Number of output tokens."""
        return len(self._history)

    def push(self, token: int) -> None:
        """Append one output token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(slot + 64, dtype=np.int64)])
            self._output = np.concatenate([self._output, np.zeros(slot + 64, dtype=np.int32)])
        self._ids[slot] = token
        self._output[slot] += 1
        self._history.append(token)

    def pop(self) -> int:
        """Take the newest output token back and return it.

        Raises:
            IndexError: There is no output token.
        """
        token = self._history.pop()
        self._output[self._slots[token]] -= 1
        return token

    def seen(self) -> NDArray[np.int64]:
        """Distinct token ids of prompt and output, ``[n]``."""
        used = len(self._slots)
        mask = self._output[:used] > 0
        mask[: self._num_prompt_slots] = True
        return self._ids[:used][mask]

    def output(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Distinct token ids of the output, ``[n]``, and how often each occurs, ``[n]``, all >= 1."""
        used = np.flatnonzero(self._output)
        return self._ids[used], self._output[used]


# --- transforms --------------------------------------------------------------------------------------------


def adjust_logits(
    logits: ArrayLike,
    params: SamplingParams,
    counts: TokenCounts | None,
    *,
    eos_ids: Collection[int],
    num_output: int,
) -> NDArray[np.float32]:
    """Apply penalties, logit bias and ``min_tokens``.

    Repetition penalty (CTRL, arXiv 1909.05858, as in Hugging Face): the logits of tokens that occur in prompt
    or output are divided by it if positive and multiplied by it if negative. Presence and frequency penalty
    (OpenAI): ``logit -= presence * (n > 0) + frequency * n`` with n the token's occurrences in the output.

    While ``num_output < min_tokens``, ``eos_ids`` and ``stop_token_ids`` are masked; if that would leave no
    token at all (a grammar that allows only the end), ``min_tokens`` gives way.

    Args:
        logits: ``[V]`` raw logits, with ``-inf`` where a grammar forbids a token.
        params: The request's parameters.
        counts: Tokens so far, including drafts assumed accepted; may be ``None`` unless
            :attr:`SamplingParams.uses_counts`.
        eos_ids: The model's own end ids.
        num_output: Output tokens before this one.

    Returns:
        ``[V]`` float32, a new array.

    Raises:
        ValueError: A penalty is on and ``counts`` is ``None``.
    """
    adjusted = np.array(logits, dtype=np.float32)
    if params.uses_counts:
        if counts is None:
            raise ValueError("a request with penalties needs its token counts")
        _apply_penalties(adjusted, params, counts)
    if params.logit_bias:
        ids = np.fromiter(params.logit_bias.keys(), dtype=np.int64)
        adjusted[ids] += np.fromiter(params.logit_bias.values(), dtype=np.float32)
    if num_output < params.min_tokens:
        ends = [*eos_ids, *params.stop_token_ids]
        masked = adjusted.copy()
        masked[ends] = -np.inf
        if masked.max() != -np.inf:
            adjusted = masked
    return adjusted


def _apply_penalties(logits: NDArray[np.float32], params: SamplingParams, counts: TokenCounts) -> None:
    if params.repetition_penalty != 1:
        seen = counts.seen()
        before = logits[seen]
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(before < 0, before * penalty, before / penalty)
    if params.presence_penalty or params.frequency_penalty:
        ids, times = counts.output()
        logits[ids] -= np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * times


def _check_max(value: np.float32) -> None:
    # NaN propagates through max(), so the maximum alone tells whether the row is usable.
    if not np.isfinite(value):
        raise NonFiniteLogitsError(f"the engine's logits are unusable: their maximum is {value}")


def _argmax(logits: NDArray[np.float32]) -> int:
    """The most likely token; the lowest id among equals."""
    token = int(np.argmax(logits))
    _check_max(logits[token])
    return token


def _largest(values: NDArray[np.float32], threshold: np.float32, count: int) -> NDArray[np.bool_]:
    """Mask of the ``count`` largest values, the smallest being ``threshold``; lowest ids among equals."""
    keep = values > threshold
    ties = np.flatnonzero(values == threshold)
    keep[ties[: count - np.count_nonzero(keep)]] = True
    return keep


def _top_k_mask(logits: NDArray[np.float32], k: int) -> NDArray[np.bool_]:
    cut = len(logits) - k
    return _largest(logits, np.partition(logits, cut)[cut], k)


def _top_p_mask(weights: NDArray[np.float32], p: float) -> NDArray[np.bool_]:
    """Mask of the smallest set of largest weights whose share reaches ``p``; the largest weight is 1.

    No full sort: the bits of non-negative floats order like the floats, so their upper half makes buckets;
    the mass per bucket tells in which one the set ends, and only that one is sorted. Peaked rows, the usual
    ones, are even cheaper: their few weights above 1e-4 hold enough mass, and only those are bucketed.
    """
    target = p * float(weights.sum(dtype=np.float64))
    candidates = np.compress(weights > 1e-4, weights)
    if candidates.sum(dtype=np.float64) < target:
        candidates = weights
    buckets = (candidates.view(np.uint32) >> 16).astype(np.intp)
    buckets -= buckets.min()  # no bins for the thousands of buckets below
    from_top = np.cumsum(np.bincount(buckets, weights=candidates)[::-1])
    # Sums of the same weights in another order may miss the target by a rounding error, here and below.
    place = int(np.searchsorted(from_top, min(target, from_top[-1])))
    bucket = len(from_top) - 1 - place
    inside = np.sort(np.compress(buckets == bucket, candidates))[::-1]
    mass = (from_top[place - 1] if place else 0.0) + np.cumsum(inside, dtype=np.float64)
    last = min(int(np.searchsorted(mass, target)), len(inside) - 1)
    return _largest(weights, inside[last], int(np.count_nonzero(buckets > bucket)) + last + 1)


def _to_weights(row: NDArray[np.float32], params: SamplingParams) -> None:
    """Turn ``[V]`` adjusted logits into the unnormalised target distribution, in place.

    The largest weight is 1, a dropped token's 0. Masks are applied by multiplication, because assignment
    through a random mask takes 20 times as long.
    """
    peak = row.max()
    _check_max(peak)
    top_k = _top_k_mask(row, params.top_k) if 0 < params.top_k < len(row) else None
    with np.errstate(over="ignore", under="ignore"):
        row -= peak
        row /= np.float32(max(params.temperature, _MIN_TEMPERATURE))
        np.exp(row, out=row)
    if top_k is not None:
        row *= top_k
    if params.top_p < 1:
        row *= _top_p_mask(row, params.top_p)
    if params.min_p > 0:
        row *= row >= np.float32(params.min_p)


def target_distribution(
    logits: ArrayLike,
    params: SamplingParams,
    counts: TokenCounts | None,
    *,
    eos_ids: Collection[int],
    num_output: int,
) -> NDArray[np.float64]:
    """The distribution the next token is drawn from, after all transforms.

    top-k keeps exactly k tokens, of equally likely ones those with the lowest ids. top-p keeps the smallest
    set of most likely tokens whose mass reaches p (of the mass top-k left), at least one token, ties again by
    lowest id. min-p keeps the tokens with at least ``min_p`` times the probability of the most likely one.
    Greedy requests give a one-hot distribution.

    Args:
        logits: As for :func:`adjust_logits`, like the other arguments.

    Returns:
        ``[V]`` float64, >= 0, sum 1.

    Raises:
        NonFiniteLogitsError: The logits hold NaN or +inf, or nothing but ``-inf``.
    """
    adjusted = adjust_logits(logits, params, counts, eos_ids=eos_ids, num_output=num_output)
    if params.temperature == 0:
        one_hot = np.zeros(len(adjusted))
        one_hot[_argmax(adjusted)] = 1
        return one_hot
    _to_weights(adjusted, params)
    probs = adjusted.astype(np.float64)
    probs /= probs.sum()
    return probs


# --- choice ------------------------------------------------------------------------------------------------


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) that depends on nothing but its arguments.

    Philox-4x64-10 (Salmon et al., SC 2011; NumPy's generator) with key ``(seed mod 2**64, 0)`` and counter
    ``(0, position, stream, 0)``; the top 53 bits of the first word times ``2**-53``.

    Args:
        seed: The request's seed; taken modulo 2**64.
        position: Which token of the sequence, >= 0.
        stream: Tells apart several draws for one position (choices of one request, acceptance tests), >= 0.
    """
    key = np.array([seed % 2**64, 0], dtype=np.uint64)
    counter = np.array([0, position, stream, 0], dtype=np.uint64)
    word = int(np.random.Philox(key=key, counter=counter).random_raw())
    return float(word >> 11) * 2.0**-53


def draw(probs: NDArray[np.float64], u: float) -> int:
    """Inverse CDF over token ids: the first token at which the cumulative mass exceeds ``u`` of the total.

    The sum is taken first over blocks of tokens, then inside one block: no row-sized temporary is needed.

    Args:
        probs: ``[V]``, >= 0, not necessarily of sum 1 (a residual of rejection sampling may be passed).
        u: A number in [0, 1).

    Returns:
        A token of positive probability.

    Raises:
        NonFiniteLogitsError: There is no mass, or it is not finite.
    """
    by_block = np.cumsum(np.add.reduceat(probs, np.arange(0, len(probs), _DRAW_BLOCK)))
    total = float(by_block[-1])
    if not (math.isfinite(total) and total > 0):
        raise NonFiniteLogitsError(f"the probabilities to draw from have the sum {total}")
    block, rest = _find_mass(by_block, u * total)
    start = block * _DRAW_BLOCK
    return start + _find_mass(np.cumsum(probs[start : start + _DRAW_BLOCK]), rest)[0]


def _find_mass(cumulative: NDArray[np.float64], wanted: float) -> tuple[int, float]:
    """First place at which ``cumulative`` exceeds ``wanted``, and what is wanted of that place.

    Rounding may put ``wanted`` at or above the total; then it is the last place with any mass.
    """
    place = int(np.searchsorted(cumulative, wanted, side="right"))
    if place == len(cumulative):
        place = int(np.searchsorted(cumulative, cumulative[-1]))
    return place, wanted - (float(cumulative[place - 1]) if place else 0.0)


def sample(
    logits: ArrayLike,
    params: SamplingParams,
    counts: TokenCounts | None,
    *,
    seed: int,
    position: int,
    eos_ids: Collection[int],
    num_output: int,
    stream: int = 0,
) -> int:
    """Choose the next token.

    Greedy requests take the most likely token of :func:`adjust_logits`, the lowest id among equals. All
    others take ``draw(target_distribution(...), uniform(seed, position, stream))``.

    Args:
        logits: As for :func:`adjust_logits`, like ``params``, ``counts``, ``eos_ids`` and ``num_output``.
        seed: As for :func:`uniform`, like ``position`` and ``stream``.

    Raises:
        NonFiniteLogitsError: The logits hold NaN or +inf, or nothing but ``-inf``.
    """
    if params.temperature == 0:
        return _argmax(adjust_logits(logits, params, counts, eos_ids=eos_ids, num_output=num_output))
    probs = target_distribution(logits, params, counts, eos_ids=eos_ids, num_output=num_output)
    return draw(probs, uniform(seed, position, stream))


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position.

    Attributes:
        token: The chosen token.
        logprob: Its natural log-probability, <= 0.
        top: The most likely tokens and their log-probabilities, most likely first, lowest id among equals.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs(logits: ArrayLike, token: int, top_n: int = 0) -> TokenLogprobs:
    """Log-probabilities under the model's own distribution, before any transform.

    They are ``logits - logsumexp(logits)`` of the raw logits, whatever the request's penalties, bias,
    temperature and truncation: the same numbers for every way of sampling, and with speculation.

    Args:
        logits: ``[V]`` raw logits.
        token: The chosen token.
        top_n: How many of the most likely tokens to list, >= 0; more than ``V`` means ``V``.

    Raises:
        NonFiniteLogitsError: The logits hold NaN or +inf, or nothing but ``-inf``.
    """
    row = np.asarray(logits, dtype=np.float32)
    peak = row.max()
    _check_max(peak)
    # float32 exponentials summed in float64: good to 1e-6, a quarter of the time of float64 ones.
    with np.errstate(under="ignore", over="ignore"):
        offset = float(peak) + math.log(float(np.exp(row - peak).sum(dtype=np.float64)))
    ids = np.flatnonzero(_top_k_mask(row, min(top_n, len(row)))) if top_n > 0 else np.empty(0, dtype=np.int64)
    ids = ids[np.argsort(-row[ids], kind="stable")]
    top = tuple((int(i), float(row[i]) - offset) for i in ids)
    return TokenLogprobs(token, float(row[token]) - offset, top)
