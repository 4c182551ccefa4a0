# SPDX-License-Identifier: Apache-2.0
"""One request, whatever becomes of the replicas that work on it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError

from nemo_build.deploy.ray_serve.affinity import Prompt
from nemo_build.deploy.ray_serve.replica import Message
from nemo_build.errors import RequestError, UserError

Call = Callable[..., Any]
"""Starts :meth:`~.replica.EngineReplica.stream` somewhere and returns its messages, an asynchronous generator."""

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError, ObjectLostError)


class LostError(UserError):
    """No replica finished a request."""


@dataclass(frozen=True)
class Generation:
    """A request.

    Attributes:
        prompt: Text, or token ids.
        params: Fields of :class:`~nemo_build.runtime.SamplingParams`; a seed is chosen if there is none.
        salt: Whose prompt it is.
        scheduling: Fields of :class:`~nemo_build.runtime.Scheduling`.
    """

    prompt: Prompt
    params: Mapping[str, Any] = field(default_factory=dict)
    salt: str | None = None
    scheduling: Mapping[str, Any] = field(default_factory=dict)

    async def stream(self, call: Call, attempts: int) -> AsyncIterator[Message]:
        """The messages of the request, each once.

        If the replica dies, another one gets the request. Since a seed determines the text, that one generates the same
        tokens again; those that were yielded already are compared and left out.

        Args:
            call: Reaches a replica.
            attempts: Replicas that are tried.

        Raises:
            RequestError: The request is invalid.
            LostError: No replica finished it, or another one generated something else.
        """
        params = dict(self.params)
        if params.get("seed") is None:
            params["seed"] = secrets.randbits(63)
        sent: list[int | None] = []
        reasons = []
        for _ in range(attempts):
            place = 0
            try:
                messages = call(self.prompt, self.salt, params, dict(self.scheduling))
                async for message in messages:
                    if "error" in message:
                        raise RequestError(message["error"])
                    if "failed" in message:
                        reasons.append(message["failed"])
                        break
                    if place < len(sent):
                        if sent[place] != message["token_id"]:
                            raise LostError(
                                "The replica died, and another one continues the text differently."
                            )
                    else:
                        sent.append(message["token_id"])
                        yield message
                    place += 1
                else:
                    return
            except _LOST as error:
                reasons.append(str(error).strip().splitlines()[0])
        raise LostError(f"None of {attempts} replicas finished the request:", reasons)


async def gather(messages: AsyncIterator[Message]) -> Message:
    """All messages of a request in one: ``text``, ``token_ids``, ``finish_reason`` and ``matched``."""
    texts, tokens, last = [], [], {}
    async with aclosing(messages) as stream:  # type: ignore[type-var]
        async for last in stream:
            texts.append(last["text"])
            if last["token_id"] is not None:
                tokens.append(last["token_id"])
    end = {name: last.get(name) for name in ("finish_reason", "matched")}
    return {"text": "".join(texts), "token_ids": tokens, **end}
