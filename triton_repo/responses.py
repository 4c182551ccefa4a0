# SPDX-License-Identifier: Apache-2.0
"""Responses to clients, of what is new of a request."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.output import Chunk
from nemo_build.runtime.request import Request
from nemo_build.triton_repo.arrays import Tensors
from nemo_build.triton_repo.asked import Asked


class Responses:
    """Makes the responses to a request, one after the other.

    Args:
        asked: What its client asks for.
        request: The request.
        echo: What comes before the text.
    """

    def __init__(self, asked: Asked, request: Request, echo: str = "") -> None:
        self._asked, self._request = asked, request
        self._echo, self._is_first = echo, True

    def __call__(self, chunks: Sequence[Chunk]) -> Tensors:
        """The response of the next chunks, at least one."""
        asked, request = self._asked, self._request
        echo = self._echo if self._is_first else ""
        tokens = [c for c in chunks if c.token_id is not None]
        outputs: dict[str, NDArray[Any]] = {
            "text_output": _strings(echo + "".join(c.text for c in chunks)),
            "finish_reason": _strings(chunks[-1].finish_reason or ""),
            "num_input_tokens": _int32(request.prompt_tokens if self._is_first else 0),
            "num_output_tokens": _int32(len(tokens)),
            "total_accepted_draft_tokens": _int32(sum(c.drafted for c in tokens)),
        }
        if asked.shows_details:
            outputs["details"] = _strings(json.dumps(self._details(chunks, len(echo))))
        if asked.params.logprobs is not None:
            found = [c.logprobs for c in tokens if c.logprobs is not None]
            outputs["logprobs"] = _strings(json.dumps([asdict(p) for p in found]))
            if asked.shows_probabilities:
                outputs["output_log_probs"] = np.array([p.logprob for p in found], np.float32)
        self._is_first = False
        return outputs

    def _details(self, chunks: Sequence[Chunk], start: int) -> dict[str, Any]:
        """What the text's pieces are; `start`: characters in front of them."""
        tokens = [c for c in chunks if c.token_id is not None]
        ends = itertools.accumulate((len(c.text) for c in tokens), initial=start)
        found: dict[str, Any] = {
            "token_ids": [c.token_id for c in tokens],
            "drafted": [int(c.drafted) for c in tokens],
            "ends": list(ends)[1:],
        }
        if chunks[-1].finish_reason is not None:
            found |= {"stop_reason": chunks[-1].matched, "rejected": self._request.rejected}
        if self._is_first:
            found["cached_tokens"] = self._request.cached_tokens or 0
            if self._request.admitted is not None:
                found["queued"] = round(self._request.admitted - self._request.arrival, 6)
        return found


def report(engine: Engine, speculator: str | None) -> Tensors:
    """The one response to who asks about the server, as JSON: what it serves, what it does and has done.

    Args:
        engine: The engine.
        speculator: Where its drafts come from.
    """
    files = read_manifest(engine.directory, ENGINE_BUNDLE)["files"]
    values = {
        "tokenizer": files["tokenizer.json"],
        "context": engine.session.context,
        "slots": engine.session.slots,
        "speculator": speculator,
        "scheduler": asdict(engine.statistics()),
        "cache": asdict(engine.cache_statistics()),
        "acceptance": asdict(engine.acceptance),
    }
    counts = ("num_input_tokens", "num_output_tokens", "total_accepted_draft_tokens")
    return {
        "text_output": _strings(json.dumps(values)),
        "finish_reason": _strings("stop"),
        **{name: _int32(0) for name in counts},
    }


def _strings(text: str) -> NDArray[np.object_]:
    return np.array([text.encode()], np.object_)


def _int32(value: int) -> NDArray[np.int32]:
    return np.array([value], np.int32)
