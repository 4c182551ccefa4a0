# SPDX-License-Identifier: Apache-2.0
"""A replica: one engine in one process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from nemo_build.deploy.ray_serve.affinity import Prompt
from nemo_build.errors import BundleError, UserError
from nemo_build.runtime import AsyncEngine, Engine, SamplingParams, Scheduling

Message = dict[str, Any]
"""What a replica sends: a token and its text, or ``error`` (the request's fault), or ``failed`` (the engine's)."""

_CANARY = SamplingParams(max_tokens=1, temperature=0)
_FIRST = Scheduling(priority=1000, salt="health check")


class EngineReplica:
    """What Ray Serve makes replicas of.

    Args:
        directory: The engine, under the same path on every node.
        options: Keyword arguments of :meth:`nemo_build.runtime.Engine.load`.
        patience: Seconds that the token of a health check may take.

    Raises:
        UserError: It cannot be opened.
    """

    async def __init__(  # type: ignore[misc]
        self, directory: str, options: Mapping[str, Any], patience: float
    ) -> None:
        # Serve awaits it, in the event loop that the requests come in.
        self.engine = await asyncio.to_thread(Engine.load, directory, **options)
        self._front = await AsyncEngine(self.engine).__aenter__()
        self._seen = self.engine.statistics()
        self._patience = patience

    async def stream(
        self, prompt: Prompt, salt: str | None, params: Mapping[str, Any], scheduling: Mapping[str, Any]
    ) -> AsyncIterator[Message]:
        """Complete a prompt.

        Args:
            prompt: Text, or token ids.
            salt: Whose prompt it is.
            params: Fields of :class:`~nemo_build.runtime.SamplingParams` that differ from the engine's defaults.
            scheduling: Fields of :class:`~nemo_build.runtime.Scheduling`.

        Yields:
            A message for each token: ``text``, ``token_id``, and on the last one ``finish_reason`` and ``matched``.
        """
        try:
            wanted = with_params(self.engine.default_params, params)
            when = Scheduling(**scheduling, salt=salt)
            run = self._front.stream(prompt, wanted, scheduling=when)
            async with aclosing(run) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    yield {
                        "text": chunk.text,
                        "token_id": chunk.token_id,
                        "finish_reason": chunk.finish_reason and chunk.finish_reason.value,
                        "matched": chunk.matched,
                    }
        except BundleError as error:
            yield {"failed": str(error)}
        except (UserError, TypeError) as error:
            yield {"error": str(error)}

    async def check_health(self) -> None:
        """Raise an error if the engine does not generate; Serve replaces the replica then.

        An engine that has made steps of which none failed, and has more to do, shows it by that. Any other is asked for
        one token, before all others.
        """
        before, self._seen = self._seen, self.engine.statistics()
        now = self._seen
        if now.running and now.steps > before.steps and now.failed == before.failed:
            return
        run = self._front.generate([0], _CANARY, scheduling=_FIRST)
        await asyncio.wait_for(run, self._patience)

    async def statistics(self) -> dict[str, Any]:
        """What the engine does, and what its prefix cache has saved; for people and tests."""
        return {
            "process": os.getpid(),
            "scheduler": asdict(self.engine.statistics()),
            "prefix_cache": asdict(self.engine.cache_statistics()),
        }


def with_params(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Parameters of sampling with what a JSON object says, where token ids of a ``logit_bias`` are strings.

    Raises:
        RequestError: Values are of a wrong type or out of range.
        TypeError: There is no such parameter.
    """
    bias = given.get("logit_bias")
    if isinstance(bias, Mapping):
        found = {
            int(t) if isinstance(t, str) and t.isdecimal() and len(t) < 10 else t: b for t, b in bias.items()
        }
        given = {**given, "logit_bias": found}
    return replace(defaults, **given)
