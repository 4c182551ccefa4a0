# SPDX-License-Identifier: Apache-2.0
"""Exact verification of a chain of drafted tokens: what comes out is distributed as without drafts.

A step of the target gives its prediction after each draft. :func:`verify` accepts a run of the drafts and adds
one token of its own. Three ways:

- *greedy*, and *sampled without draft distributions*: the token is chosen at each position exactly as plain
  decoding chooses it, with the same uniform number; drafts are accepted while they equal it. The text does not
  depend on the drafts at all, so a seed gives the same text with and without speculation, and drafts may come
  from anywhere. In particular a drafter may draw them from its own distribution with the *same* number,
  ``draw(q, uniform(seed, position + i))``; such drafts usually agree with the target's choice more often than
  the drafter's most likely tokens do.
- *token*: rejection sampling with the distributions the drafts were drawn from (Leviathan et al.,
  arXiv 2211.17192; Chen et al., arXiv 2302.01318). A draft of q is accepted with the probability
  ``1 - TV(p, q)``, the most any verifier of one token can reach. Same distribution of texts, other text.
- *block*: the same for the whole run at once (Sun et al., arXiv 2403.10444); never accepts fewer.

Uniform numbers (:func:`nemo_build.runtime.sampling.uniform`), P the position of the step's first new token:

=================================  =========================
the token the target adds          (seed, its position, 0)
acceptance of the run up to i      (seed, P, 2**32 + i)
drawing draft i                    (seed, P, 2**33 + i)
=================================  =========================

Acceptance and drafting are keyed by the step, not by the token's position: block verification looks at numbers
and drafts past the run that it accepts, and the next step must not see these again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_build.runtime.constraints.base import Guide
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import TokenCounts, draw, sample, target_distribution, uniform

__all__ = ["Method", "Verdict", "draft_uniform", "verify"]

Method = Literal["token", "block"]

_ACCEPT_STREAM = 2**32
_DRAFT_STREAM = 2**33

_MIN_RESIDUAL = 1e-10
"""A residual of less mass is rounding noise of sums over a vocabulary; it is reached as rarely."""

_Probs = NDArray[np.float64]
_Acceptance = tuple[int, _Probs | None]
"""How many drafts are accepted, and what to draw the next token from; ``None``: the target's last row."""


@dataclass(frozen=True)
class Verdict:
    """What a verified step adds to a sequence.

    Attributes:
        tokens: The new tokens, 1 to k + 1: the accepted drafts, then the target's correction of the first
            rejected one or, after all of them, its next token. An end token ends it: if that is an accepted
            draft, nothing follows and ``len(tokens) == accepted``, else ``len(tokens) == accepted + 1``.
        accepted: How many of the drafts are accepted.
        ended: Whether the last token is one that ends the text.
    """

    tokens: tuple[int, ...]
    accepted: int
    ended: bool


def draft_uniform(seed: int, position: int, index: int) -> float:
    """The number in [0, 1) with which to draw a draft whose distribution is passed to :func:`verify`.

    Args:
        seed: The request's seed.
        position: Position of the first draft of the step, as for :func:`verify`.
        index: Which draft of the step, >= 0.
    """
    return uniform(seed, position, _DRAFT_STREAM + index)


def verify(
    logits: ArrayLike,
    draft: Sequence[int],
    params: SamplingParams,
    counts: TokenCounts | None,
    *,
    seed: int,
    position: int,
    eos_ids: Collection[int],
    num_output: int,
    probabilities: ArrayLike | None = None,
    method: Method = "token",
    guide: Guide | None = None,
) -> Verdict:
    """Accept a run of drafts and choose one token more.

    The target distribution of a row is that of plain decoding after the drafts before it: penalties count
    them, and ``min_tokens`` counts positions. Rows are transformed one by one as they are needed: none after
    the first rejection, and with ``block`` none after a draft that the target cannot produce.

    Drafts behind one that ends the text are ignored. ``max_tokens`` and stop strings are the caller's
    business: it drafts no further than ``max_tokens``, and drops what follows a stop string.

    Args:
        logits: ``[k + 1, V]`` raw logits; row i is the target's prediction after ``draft[:i]``.
        draft: k >= 0 token ids.
        params: The request's parameters.
        counts: Tokens so far, without the drafts; may be ``None`` unless :attr:`SamplingParams.uses_counts`.
            They are left as they were found; the caller pushes the tokens of the verdict.
        seed: The request's seed.
        position: Position of the first new token, ``draft[0]``, in the sequence.
        eos_ids: The model's own end ids.
        num_output: Output tokens so far.
        probabilities: ``[k, V]``, row i the distribution from which ``draft[i]`` was drawn with a number
            that the target does not use (:func:`draft_uniform`). It need not be normalised exactly: drawing
            divides by the sum, and so does this. ``None``: the draft is whatever it is. Greedy requests do
            not need it and ignore it.
        method: How drafts with distributions are verified. Without them both methods are one.
        guide: Says which tokens are allowed in each row, whatever the transforms; ``None``: all of them.

    Raises:
        RequestError: The guide cannot go on.
        NonFiniteLogitsError: A row that is needed holds NaN or +inf, or nothing but ``-inf``.
        ValueError: Shapes do not match, a draft is not below V or has no probability in the distribution it
            was drawn from, or a penalty is on and ``counts`` is ``None``.
    """
    rows, proposals = _check(np.asarray(logits), draft, probabilities, method)
    ends = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)

    def is_end(index: int, token: int) -> bool:
        return token in ends and num_output + index >= params.min_tokens

    stop = next((i + 1 for i, token in enumerate(draft) if is_end(i, token)), None)
    draft = [int(token) for token in draft[:stop]]
    target = _Target(rows, draft, params, counts, eos_ids=eos_ids, num_output=num_output, guide=guide)
    try:
        if proposals is None or params.temperature == 0:
            tokens = _matching(target, draft, seed, position, bonus=stop is None)
            accepted = target.row
        else:
            accept = _accept_block if method == "block" else _accept_tokens
            accepted, rest = accept(
                target, draft, proposals, lambda i: uniform(seed, position, _ACCEPT_STREAM + i)
            )
            tokens = draft[:accepted]
            if accepted < len(draft) or stop is None:
                probs = target.distribution() if rest is None else rest
                tokens.append(draw(probs, uniform(seed, position + accepted)))
    finally:
        target.restore()
    return Verdict(tuple(tokens), accepted, is_end(len(tokens) - 1, tokens[-1]))


def _check(
    logits: NDArray[np.float32], draft: Sequence[int], probabilities: ArrayLike | None, method: Method
) -> tuple[NDArray[np.float32], NDArray[np.floating] | None]:
    """The arrays, of the right shapes."""
    count = len(draft)
    if method not in ("token", "block"):
        raise ValueError(f"there is no verification method {method!r}")
    if logits.ndim != 2 or len(logits) != count + 1:
        raise ValueError(f"{count} drafts need logits [{count + 1}, V], not {list(logits.shape)}")
    vocabulary = logits.shape[1]
    if any(not 0 <= token < vocabulary for token in draft):
        raise ValueError(f"the drafts {list(draft)} are not all token ids below {vocabulary}")
    if probabilities is None:
        return logits, None
    proposals = np.asarray(probabilities)
    if count and proposals.shape != (count, vocabulary):
        raise ValueError(f"{count} drafts need probabilities [{count}, V], not {list(proposals.shape)}")
    return logits, proposals


class _Target:
    """The target's predictions along the drafts, transformed when they are asked for.

    Args:
        logits: ``[k + 1, V]``; the other arguments as for :func:`verify`, the drafts up to the end of the text.

    Attributes:
        row: The current row, which is also the number of drafts before it.
    """

    def __init__(
        self,
        logits: NDArray[np.float32],
        draft: Sequence[int],
        params: SamplingParams,
        counts: TokenCounts | None,
        *,
        eos_ids: Collection[int],
        num_output: int,
        guide: Guide | None,
    ) -> None:
        self.row = 0
        self._logits, self._draft, self._guide = logits, draft, guide
        self._params = params
        self._counts = counts
        self._eos_ids = eos_ids
        self._num_output = num_output
        self._pushed = 0

    def advance(self, token: int) -> None:
        """Go to the row after ``token``."""
        self.row += 1
        if self._counts is not None and self._params.uses_counts:
            self._counts.push(token)
            self._pushed += 1

    def restore(self) -> None:
        """Take the drafts out of the counts again."""
        for _ in range(self._pushed):
            assert self._counts is not None
            self._counts.pop()
        self._pushed = 0

    def _row(self) -> NDArray[np.float32]:
        """The logits of the current row, as far as its tokens are allowed."""
        logits: NDArray[np.float32] = self._logits[self.row]
        return logits if self._guide is None else self._guide.masked(logits, self._draft[: self.row])

    def choose(self, seed: int, position: int) -> int:
        """The token that plain decoding chooses here; ``position`` is that of row 0."""
        return sample(
            self._row(),
            self._params,
            self._counts,
            seed=seed,
            position=position + self.row,
            eos_ids=self._eos_ids,
            num_output=self._num_output + self.row,
        )

    def distribution(self) -> _Probs:
        """The target distribution of the current row, ``[V]``."""
        return target_distribution(
            self._row(),
            self._params,
            self._counts,
            eos_ids=self._eos_ids,
            num_output=self._num_output + self.row,
        )


def _matching(target: _Target, draft: list[int], seed: int, position: int, *, bonus: bool) -> list[int]:
    """Plain decoding for as long as it gives the drafts; ``target.row`` ends as the number of those.

    Drawing y from p and accepting the draft d where y = d is rejection sampling with a one-hot q: d is accepted
    with the probability p(d), and y, where it is not d, has the distribution of the residual.

    Args:
        bonus: Whether to choose a token after the last draft.
    """
    for token in draft:
        choice = target.choose(seed, position)
        if choice != token:
            return [*draft[: target.row], choice]
        target.advance(token)
    return [*draft, target.choose(seed, position)] if bonus else draft


def _proposal(proposals: NDArray[np.floating], index: int, token: int) -> _Probs:
    """The distribution ``[V]`` from which draft ``index`` was drawn."""
    q: _Probs = proposals[index].astype(np.float64)
    total = q.sum()
    if not (np.isfinite(total) and q[token] > 0):
        raise ValueError(f"draft {index} is token {token}, whose probability was {proposals[index][token]}")
    q /= total
    return q


def _residual(weight: float, p: _Probs, q: _Probs) -> _Probs:
    """``max(weight * p - q, 0)``, ``[V]``, not normalised; p where nothing is left but rounding errors."""
    rest: _Probs = np.maximum(weight * p - q, 0)
    return rest if rest.sum() > _MIN_RESIDUAL else p


def _accept_tokens(
    target: _Target,
    draft: list[int],
    proposals: NDArray[np.floating],
    number: Callable[[int], float],
) -> _Acceptance:
    """Draft d is accepted with the probability ``min(1, p(d) / q(d))``, up to the first that is not.

    Instead of that one, a token is drawn from ``norm(max(p - q, 0))`` (arXiv 2211.17192, algorithm 1).
    """
    for index, token in enumerate(draft):
        p, q = target.distribution(), _proposal(proposals, index, token)
        if not number(index + 1) < float(p[token]) / float(q[token]):
            return index, _residual(1.0, p, q)
        target.advance(token)
    return len(draft), None


def _accept_block(
    target: _Target,
    draft: list[int],
    proposals: NDArray[np.floating],
    number: Callable[[int], float],
) -> _Acceptance:
    """The longest run that is accepted; each is tried by itself, also after one that was not.

    With ``P_0 = 1``, ``P_i = min(1, P_{i-1} * p_i(d_i) / q_i(d_i))`` and
    ``Z_i = sum(max(P_i * p_{i+1} - q_{i+1}, 0))``, the run of i < k drafts is accepted with the probability
    ``Z_i / (Z_i + 1 - P_i)``, that of all k with ``P_k``. After a run of i < k drafts a token is drawn from
    ``norm(max(P_i * p_{i+1} - q_{i+1}, 0))`` (arXiv 2403.10444, algorithm 2). Once P is 0 it stays 0.

    Stopping at an end token inside the drafts is exact: it is the same as a target and a drafter that both
    follow it with padding for certain, for which all runs but the full one have the probability 0.
    """
    accepted, rest, weight = 0, None, 1.0
    for index, token in enumerate(draft):
        p, q = target.distribution(), _proposal(proposals, index, token)
        excess = float(np.maximum(weight * p - q, 0).sum())
        scale = excess + 1 - weight
        if index == 0 or number(index) < (excess / scale if scale > 0 else 1.0):
            accepted, rest = index, (weight, p, q)
        weight = min(1.0, weight * (float(p[token]) / float(q[token])))
        if weight == 0:
            break
        target.advance(token)
    if not draft or (weight > 0 and number(len(draft)) < weight):
        return len(draft), None
    assert rest is not None
    return accepted, _residual(*rest)
