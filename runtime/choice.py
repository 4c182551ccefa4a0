# SPDX-License-Identifier: Apache-2.0
"""Choosing the tokens of one request, wherever the logits are."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from nemo_build.runtime.constraints.base import Guide
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.sampling import TokenCounts, TokenLogprobs, logprobs
from nemo_build.runtime.speculation.base import Chooser
from nemo_build.runtime.speculation.drafting import Drafting, chooser_for
from nemo_build.runtime.speculation.verify import Method, verify

__all__ = ["TokenChooser", "likeliest"]


class TokenChooser:
    """The parameters of a request, and what the next choice depends on of its past.

    Args:
        params: How tokens are chosen.
        seed: The request's seed.
        eos_ids: Ids that end it.
        prompt: Its prompt.
        output: What came after that so far.
        guide: What the output has to obey, from its beginning; ``None``: nothing. Used by nobody else.

    Attributes:
        params: As given, like `seed` and `eos_ids`.
        takes_likeliest: Whether it takes the most likely token, whatever it is.
        finished: Whether nothing can follow the output by what it has to obey.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        eos_ids: Collection[int],
        prompt: Sequence[int],
        output: Sequence[int] = (),
        guide: Guide | None = None,
    ) -> None:
        self.params, self.seed, self.eos_ids = params, seed, eos_ids
        self._prompt_tokens = self._length = len(prompt)
        self._counts = TokenCounts(prompt) if params.uses_counts else None
        self._guide = guide
        self._is_plain = (
            params.temperature == 0
            and not (params.uses_counts or params.logit_bias)
            and params.min_tokens == 0
        )
        self.takes_likeliest = self._is_plain and guide is None
        self.finished = False
        for token in output:
            self.push(token)

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return self._length

    def push(self, token: int) -> None:
        """A token has been added to the output."""
        self._length += 1
        if self._counts is not None:
            self._counts.push(token)
        if self._guide is not None:
            self._follow(self._guide, token)

    def _follow(self, guide: Guide, token: int) -> None:
        """The guide goes on, or has had its say."""
        guide.commit(token)
        self.finished = guide.finished
        if guide.done:
            self._guide = None
            self.takes_likeliest = self._is_plain

    def choose(
        self,
        logits: NDArray[np.float32],
        best: Sequence[int] | None,
        drafts: Sequence[int] = (),
        probabilities: NDArray[np.float64] | None = None,
        method: Method = "token",
    ) -> tuple[Sequence[int], int]:
        """The tokens that follow the last one.

        Args:
            logits: ``[len(drafts) + 1, V]``: after the last token, and after each draft.
            best: The most likely tokens by `logits`; ``None``: some are not finite.
            drafts: Tokens that may follow.
            probabilities: As of :func:`~nemo_build.runtime.speculation.verify.verify`, like `method`.

        Returns:
            The tokens, and how many drafts are accepted, which are the first of them.

        Raises:
            NonFiniteLogitsError: The logits are unusable.
            RequestError: What the output has to obey is too complex to go on with.
        """
        if self.takes_likeliest and best is not None:
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == best[accepted]:
                accepted += 1
            return best[: accepted + 1], accepted
        verdict = verify(
            logits,
            drafts,
            self.params,
            self._counts,
            seed=self.seed,
            position=self._length,
            eos_ids=self.eos_ids,
            num_output=self._length - self._prompt_tokens,
            probabilities=probabilities,
            method=method,
            guide=self._guide,
        )
        return verdict.tokens, verdict.accepted

    def logprobs(self, logits: NDArray[np.float32], tokens: Sequence[int]) -> list[TokenLogprobs] | None:
        """The log-probabilities of chosen tokens, if the request asks for them.

        Args:
            logits: Those that :meth:`choose` took.
            tokens: Those that it returned.

        Raises:
            NonFiniteLogitsError: The logits are unusable.
        """
        top = self.params.logprobs
        if top is None:
            return None
        return [logprobs(row, token, top) for row, token in zip(logits, tokens, strict=False)]

    def for_drafts(self, method: Drafting = "coupled") -> Chooser:
        """What chooses the drafts of the next step."""
        return chooser_for(
            self.params,
            self._counts,
            seed=self.seed,
            position=self._length,
            eos_ids=self.eos_ids,
            num_output=self._length - self._prompt_tokens,
            method=method,
            guide=self._guide,
        )

    def corrected(self, drafts: list[int], most: int) -> list[int]:
        """Drafts that nobody chose from logits, by what the output has to obey; at most so many."""
        return drafts if self._guide is None else self._guide.corrected(drafts, most)


def likeliest(choosers: Sequence[TokenChooser], logits: NDArray[np.float32]) -> tuple[list[int], bool]:
    """The most likely tokens by each row of logits, if anybody asks for them, and whether all are finite."""
    if not len(logits) or not any(c.takes_likeliest for c in choosers):
        return [], False
    tokens = logits.argmax(axis=-1)
    finite = bool(np.isfinite(logits[np.arange(len(tokens)), tokens]).all())
    found: list[int] = tokens.tolist()
    return found, finite
