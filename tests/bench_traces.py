# SPDX-License-Identifier: Apache-2.0
"""Requests and traces for tests of measurements."""

from __future__ import annotations

from nemo_build.runtime import SamplingParams
from nemo_build.runtime.bench.load import Request, Trace

CATEGORIES = ("code", "prose", "dialogue", "structured", "repetition")
"""Those of the shipped prompts, in their order."""


def request(index: int = 0, tokens: int = 4, category: str = "code") -> Request:
    """A request with a prompt of so many tokens."""
    return Request(index, category, tuple(range(5, 5 + tokens)), SamplingParams(max_tokens=8))


def trace(
    sent: float, times: list[float], drafted: str = "", prompt: int = 4, category: str = "code"
) -> Trace:
    """A trace; `drafted` has a ``d`` for each token that was a draft."""
    flags = [c == "d" for c in drafted.ljust(len(times), ".")]
    return Trace(request(tokens=prompt, category=category), sent, times, list(range(len(times))), flags)
