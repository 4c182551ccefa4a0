# SPDX-License-Identifier: Apache-2.0
"""What readers of a request get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime.request import Request
from nemo_build.runtime.sampling import TokenLogprobs
from nemo_build.runtime.stopping import FinishReason

__all__ = ["Chunk", "Completion", "completion", "take"]


@dataclass(frozen=True)
class Completion:
    """A finished generation.

    Attributes:
        text: The generated text.
        token_ids: The generated tokens, the end token included.
        finish_reason: Why it ended.
        matched: The stop string, or the id of the end token, that ended it.
        prompt_tokens: Length of the prompt.
        seed: The seed of its random numbers, chosen by the engine if the request had none.
        cached_tokens: Tokens of the prompt that came from the prefix cache.
        logprobs: The log-probabilities of each token, if the request asked for them.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched: str | int | None
    prompt_tokens: int
    seed: int = field(compare=False)
    cached_tokens: int = field(compare=False)
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed generation.

    Attributes:
        index: Which of the prompts it belongs to.
        text: New text, possibly empty while a character or a stop string is incomplete.
        token_id: The token it came from; ``None`` where the end came without one.
        finish_reason: Set on the last chunk.
        matched: On the last chunk: the stop string, or the id of the end token, that ended it.
        drafted: Whether the token was a draft that was accepted.
        logprobs: The log-probabilities at the token, if the request asked for them.
    """

    index: int
    text: str
    token_id: int | None
    finish_reason: FinishReason | None = None
    matched: str | int | None = None
    drafted: bool = False
    logprobs: TokenLogprobs | None = None


def take(request: Request, index: int) -> Iterator[Chunk]:
    """What is new of a request, which is the reader's prompt number `index`.

    Raises:
        BundleError: The engine fails.
        RequestError: The request's grammar turned out too complex to go on with.
    """
    while request.events:
        event = request.events.popleft()
        text = event.text
        yield Chunk(
            index, text.emit, event.token, text.finish_reason, text.matched, event.drafted, event.logprobs
        )
    if isinstance(request.error, RequestError):
        raise request.error
    if request.error is not None:
        hint = "Check the engine with `nemo-build inspect --verify`, or build it again."
        raise BundleError(f"The engine fails: {request.error}", hint=hint) from request.error


def completion(request: Request, chunks: Iterable[Chunk]) -> Completion:
    """All chunks of a request that has ended, in one."""
    chunks = list(chunks)
    return Completion(
        "".join(c.text for c in chunks),
        tuple(request.output),
        chunks[-1].finish_reason or FinishReason.CANCELLED,
        chunks[-1].matched,
        request.prompt_tokens,
        request.seed,
        request.cached_tokens or 0,
        None
        if request.params.logprobs is None
        else tuple(c.logprobs for c in chunks if c.logprobs is not None),
    )
