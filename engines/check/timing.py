# SPDX-License-Identifier: Apache-2.0
"""How long an engine takes, or two by turns: to open, to the first token, between tokens.

By turns means pass by pass within a few milliseconds, in an order that is drawn, as one that repeats may fall in with
what else the machine does at regular times. Of several passes the fastest counts: others at work on the machine make
single ones several times slower, and that says nothing of an engine.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.engines.check.prompts import filled

if TYPE_CHECKING:
    from nemo_build.runtime.engine import Engine
    from nemo_build.runtime.request import Request

Timed = dict[str, dict[str, list[float]]]
"""By side, ``now`` and maybe ``before``, and figure: a value for each time that it was measured."""

_LONGEST = 192
"""Tokens after which requests begin anew, so that their context stays about what it is called."""

_ROOM = 32
"""Positions that a prompt must leave."""

_FIRST_TOKEN_SECONDS = 0.02
_FIRST_TOKEN_PASSES = 10
"""Passes of a value for the first token, and the seconds that they should not take longer than; one is made anyway."""


@dataclass(frozen=True)
class Case:
    """What is timed together.

    Attributes:
        mode: Words for how the engine is loaded; empty for no speculation.
        options: Those of ``Engine.load``.
        batch: Sequences at a time.
        context: Tokens of each prompt.
    """

    mode: str
    options: Mapping[str, Any] = field(hash=False)
    batch: int
    context: int

    def figure(self, what: str) -> str:
        """The name of a figure: ``first token s``, ``between tokens s`` or ``tokens/s``."""
        return f"{what}{self.mode} at {self.batch}x{self.context}"

    @property
    def figures(self) -> set[str]:
        """Names of all."""
        return {self.figure(what) for what in ("first token s", "between tokens s", "tokens/s")}

    def fits(self, engines: Mapping[str, Engine]) -> bool:
        """Whether engines can have so many sequences of that length."""
        sessions = [e.session for e in engines.values()]
        return all(self.batch <= s.slots and self.context <= s.context - _ROOM for s in sessions)


@dataclass(frozen=True)
class Effort:
    """How often a case is timed.

    Attributes:
        first_tokens: Values for the time to the first token.
        steps: Steps of a round.
        rounds: Rounds, and the number after which it is decided whether so many more are made.
        most_rounds: Rounds at most.
    """

    first_tokens: int
    steps: int
    rounds: int
    most_rounds: int


def load(path: Path, options: Mapping[str, Any]) -> Engine:
    """An engine of its own, whatever else is open."""
    from nemo_build.runtime.engine import Engine

    return Engine.load(path, **options)


def time_opening(paths: Mapping[str, Path], options: Mapping[str, Any], times: int, found: Timed) -> None:
    """Add the seconds that it takes to load each."""
    for turn in range(times):
        for side in _turn(paths, turn):
            start = time.perf_counter()
            load(paths[side], options)
            add(found, side, "load s", time.perf_counter() - start)


def time_case(
    engines: Mapping[str, Engine], case: Case, effort: Effort, more: Callable[[], bool], found: Timed
) -> None:
    """Time one mode at one size: first tokens, then rounds of a few steps.

    Args:
        engines: By side.
        case: Of which the engines were loaded with the options.
        effort: How often.
        more: Asked after so many rounds as `effort` says, and again: whether so many more are made.
        found: Is added to.
    """
    _time_first_tokens(engines, case, effort, found)
    steppers = {side: _Stepper(e, case.batch, case.context) for side, e in engines.items()}
    gc.collect()
    for turn in range(effort.most_rounds):
        if turn > 0 and turn % effort.rounds == 0 and not more():
            break
        _time_round(steppers, turn, case, effort, found)
    for stepper in steppers.values():
        stepper.close()


def add(found: Timed, side: str, name: str, value: float) -> None:
    """Add a value to a figure."""
    found.setdefault(side, {}).setdefault(name, []).append(value)


def _time_first_tokens(engines: Mapping[str, Engine], case: Case, effort: Effort, found: Timed) -> None:
    # The first time memory is touched, and threads start.
    warm = [_first_token(e, case) for e in engines.values() for _ in range(2)]
    passes = max(1, min(_FIRST_TOKEN_PASSES, int(_FIRST_TOKEN_SECONDS / min(warm))))
    for turn in range(effort.first_tokens):
        seconds: dict[str, list[float]] = {side: [] for side in engines}
        for i in range(passes):
            for side in _turn(engines, turn * passes + i):
                seconds[side].append(_first_token(engines[side], case))
        for side in engines:
            add(found, side, case.figure("first token s"), min(seconds[side]))


def _time_round(
    steppers: Mapping[str, _Stepper], turn: int, case: Case, effort: Effort, found: Timed
) -> None:
    """A few steps of each side."""
    seconds: dict[str, list[float]] = {side: [] for side in steppers}
    tokens = dict.fromkeys(steppers, 0)
    for i in range(effort.steps):
        for side in _turn(steppers, turn * effort.steps + i):
            elapsed, count = steppers[side].step()
            seconds[side].append(elapsed)
            tokens[side] += count
    for side in steppers:
        step, each = min(seconds[side]), tokens[side] / effort.steps
        add(found, side, case.figure("between tokens s"), step * case.batch / each)
        add(found, side, case.figure("tokens/s"), each / step)


class _Stepper:
    """Requests that are stepped; where one of them ends, all begin anew, which is not timed."""

    def __init__(self, engine: Engine, batch: int, context: int) -> None:
        from nemo_build.runtime.params import SamplingParams

        self._engine, self._prompts = engine, filled(engine, batch, context)
        most = min(_LONGEST, engine.session.context - context)
        self._params = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True)
        self._requests: list[Request] = []

    def step(self) -> tuple[float, int]:
        """Seconds of a step, and tokens that came of it."""
        if not self._requests or any(r.finished for r in self._requests):
            self._begin()
        for request in self._requests:
            request.events.clear()
        start = time.perf_counter()
        self._engine.step()
        seconds = time.perf_counter() - start
        return seconds, sum(len(r.events) for r in self._requests)

    def close(self) -> None:
        """End the requests."""
        self._engine.cancel(self._requests)
        while self._engine.unfinished:
            self._engine.step()

    def _begin(self) -> None:
        self.close()
        self._requests = self._engine.requests(self._prompts, self._params)
        self._engine.add(self._requests)
        while not all(r.events for r in self._requests):
            self._engine.step()
        self._engine.step()


def _first_token(engine: Engine, case: Case) -> float:
    """Mean seconds to the first token."""
    from nemo_build.runtime.params import SamplingParams

    prompts = filled(engine, case.batch, case.context)
    start = time.perf_counter()
    first = [
        time.perf_counter() - start
        for chunk in engine.stream(prompts, SamplingParams(max_tokens=1, temperature=0, ignore_eos=True))
        if chunk.token_id is not None
    ]
    return sum(first) / len(first)


def _turn(sides: Mapping[str, Any], turn: int) -> list[str]:
    """The sides in an order that is drawn, the same each time."""
    return random.Random(turn).sample(sorted(sides), len(sides))
