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
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_build.errors import RequestError

__all__ = [
    "NonFiniteLogitsError",
    "SamplingParams",
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


# --- parameters --------------------------------------------------------------------------------------------

_LIMITS: tuple[tuple[str, type, str, Callable[[Any], bool]], ...] = (
    ("max_tokens", numbers.Integral, "an integer of at least 1", lambda v: v >= 1),
    ("temperature", numbers.Real, "a number from 0 to 100", lambda v: 0 <= v <= 100),
    ("top_p", numbers.Real, "a number above 0 and at most 1", lambda v: 0 < v <= 1),
    ("top_k", numbers.Integral, "an integer of at least 0 (0 or -1: off)", lambda v: v >= -1),
    ("min_p", numbers.Real, "a number from 0 to 1", lambda v: 0 <= v <= 1),
    ("repetition_penalty", numbers.Real, "a number from 0.01 to 100", lambda v: 0.01 <= v <= 100),
    ("presence_penalty", numbers.Real, "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("frequency_penalty", numbers.Real, "a number from -2 to 2", lambda v: -2 <= v <= 2),
    ("min_tokens", numbers.Integral, "an integer of at least 0", lambda v: v >= 0),
)


def _is_number(value: object, kind: type) -> bool:
    # bool is an Integral, but `"top_k": true` is a mistake, not a one.
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value)  # type: ignore[arg-type]


def _is_token_id(value: object) -> bool:
    return _is_number(value, numbers.Integral) and value >= 0  # type: ignore[operator]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_tokens: Most tokens to generate, >= 1.
        temperature: Divides the logits, [0, 100]; 0 is greedy. Values in (0, 1e-6) act as 1e-6.
        top_p: Nucleus mass in (0, 1]; 1 is off.
        top_k: Number of most likely tokens kept; 0 (or -1) is off.
        min_p: Tokens below this fraction of the most likely one are dropped, [0, 1]; 0 is off.
        repetition_penalty: [0.01, 100]; 1 is off. Counts prompt and output.
        presence_penalty: [-2, 2]; 0 is off. Counts output only.
        frequency_penalty: [-2, 2]; 0 is off. Counts output only.
        logit_bias: Token id to a value in [-100, 100] that is added to its logit.
        seed: Any 64-bit integer, signed or unsigned; ``None`` lets the engine choose one.
        stop: Strings that end the text; a plain string counts as one. None may be empty.
        stop_token_ids: Token ids that end the text, besides the model's own.
        include_stop: Keep the stop string, or the text of the stop token, in the output.
        ignore_eos: The model's own end ids do not end the text.
        min_tokens: The first ``min_tokens`` tokens do not end the text (but ``max_tokens`` does).

    Raises:
        RequestError: Listing every value of a wrong type or out of range.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be {text}, got {getattr(self, name)!r}"
            for name, kind, text, within in _LIMITS
            if not (_is_number(getattr(self, name), kind) and within(getattr(self, name)))
        ]
        if not problems and self.min_tokens > self.max_tokens:
            problems.append(f"min_tokens ({self.min_tokens}) is more than max_tokens ({self.max_tokens})")
        for name in ("include_stop", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                problems.append(f"{name} must be true or false, got {getattr(self, name)!r}")
        seed = self.seed
        if seed is not None and not (_is_number(seed, numbers.Integral) and -(2**63) <= seed < 2**64):
            problems.append(f"seed must be a 64-bit integer, got {seed!r}")
        problems += self._check_stops() + self._check_bias()
        if problems:
            raise RequestError("The sampling parameters are invalid.", problems)
        # Own, plain copies: the caller's list or dict may change while the request runs.
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(i) for i in self.stop_token_ids))
        object.__setattr__(self, "logit_bias", {int(i): float(b) for i, b in self.logit_bias.items()})
        object.__setattr__(self, "top_k", max(int(self.top_k), 0))

    def _check_stops(self) -> list[str]:
        problems = []
        stop: object = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, (list, tuple)) or not all(isinstance(s, str) for s in stop):
            problems.append(f"stop must be a string or a list of strings, got {stop!r}")
        elif "" in stop:
            problems.append("stop holds an empty string")
        ids: object = self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or not all(map(_is_token_id, ids)):
            problems.append(f"stop_token_ids must be a list of token ids (integers >= 0), got {ids!r}")
        return problems

    def _check_bias(self) -> list[str]:
        if not isinstance(self.logit_bias, Mapping):
            return [f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"]
        problems = []
        for token, bias in self.logit_bias.items():
            if not _is_token_id(token):
                problems.append(f"logit_bias: {token!r} is no token id (integer >= 0)")
            if not (_is_number(bias, numbers.Real) and -100 <= bias <= 100):
                problems.append(f"logit_bias[{token!r}] must be a number from -100 to 100, got {bias!r}")
        return problems

    @property
    def uses_counts(self) -> bool:
        """Whether any penalty is on, so that :class:`TokenCounts` must be kept for the request."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids of the request against the model.

        Args:
            vocab_size: Width ``V`` of the model's logits.

        Raises:
            RequestError: Listing every id in ``logit_bias`` and ``stop_token_ids`` that is not below
                ``vocab_size``.
        """
        named = {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids}
        problems = [f"{name}: token id {i}" for name, ids in named.items() for i in ids if i >= vocab_size]
        if problems:
            raise RequestError(f"The model has only token ids 0 to {vocab_size - 1}.", problems)


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
