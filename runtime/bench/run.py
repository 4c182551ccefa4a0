# SPDX-License-Identifier: Apache-2.0
"""A measurement: every setting in turn, over several rounds, and the checks that go with it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.backends import engine_graphs
from nemo_build.errors import RequestError
from nemo_build.runtime.bench.load import (
    LoadGenerator,
    Request,
    Trace,
    make_requests,
    poisson_arrivals,
    warm_up_requests,
)
from nemo_build.runtime.bench.measure import (
    Drafts,
    StepYield,
    medians,
    processor_wait,
    statistics,
    step_yields,
    thread_seconds,
)
from nemo_build.runtime.bench.prompts import DEFAULT_PROMPTS, read_prompts, tokenize
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.speculation.kinds import available_speculators, speculator_kind

NONE = "none"
"""The speculator that is none."""

ALL = "all"
"""In place of a speculator: none, and every one that the engine has the graphs for."""

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how many requests of it have ended, and how many there are."""


@dataclass(frozen=True)
class BenchOptions:
    """What to measure, and how.

    Attributes:
        concurrency: Numbers of sequences at a time, each >= 1.
        speculators: Names of :data:`~nemo_build.runtime.speculation.kinds.SPECULATORS`, ``none``, or ``all``.
        draft_lengths: Drafts of a sequence in a step; ``None``: chosen from step to step. ``none`` has no use for it.
        requests: Requests of a run; ``None``: every prompt once, but at least two for each stream.
        input_length: Tokens of a prompt; ``None``: as the prompts are.
        output_length: Tokens that a request generates at most.
        ignore_eos: Generate so many even where the text would have ended.
        rate: Requests per second on average, arriving at random; ``None``: a request follows its predecessor.
        warm_up: Requests before each run that do not count; ``None``: one for each stream.
        rounds: How often every setting is measured.
        prompts: A file of prompts; see :func:`read_prompts`.
        threads: As :meth:`Engine.load` takes it.
        check: Compare greedy texts with plain decoding's.
        sampling: What replaces the engine's own defaults, by names of :class:`SamplingParams`.
    """

    concurrency: tuple[int, ...] = (1,)
    speculators: tuple[str, ...] = (NONE,)
    draft_lengths: tuple[int | None, ...] = (None,)
    requests: int | None = None
    input_length: int | None = None
    output_length: int = 128
    ignore_eos: bool = False
    rate: float | None = None
    warm_up: int | None = None
    rounds: int = 3
    prompts: Path = DEFAULT_PROMPTS
    threads: int | None = None
    check: bool = True
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Setting:
    """One of the things that are compared.

    Attributes:
        concurrency: Sequences at a time.
        speculator: Its name.
        draft_length: Drafts of a sequence in a step; ``None`` chooses, or there is no speculator.
    """

    concurrency: int
    speculator: str
    draft_length: int | None

    @property
    def drafts(self) -> str:
        """The draft length for people."""
        if self.speculator == NONE:
            return ""
        return "auto" if self.draft_length is None else str(self.draft_length)

    @property
    def method(self) -> str:
        """Speculator and draft length for people."""
        return f"{self.speculator} {self.drafts}".rstrip()


@dataclass
class Measured:
    """What was found of a setting.

    Attributes:
        rounds: The statistics of each round.
        drafts: What came of drafts, over all rounds.
        yields: Tokens that steps yielded, by category of prompts, over all rounds.
    """

    rounds: list[dict[str, Any]] = field(default_factory=list)
    drafts: Drafts = field(default_factory=Drafts)
    yields: dict[str, StepYield] = field(default_factory=dict)

    @property
    def median(self) -> dict[str, Any]:
        """The medians of the statistics over the rounds."""
        return medians(self.rounds)


@dataclass(frozen=True)
class Difference:
    """A greedy text that is not plain decoding's: of which setting and request, and from which token on."""

    setting: Setting
    request: int
    position: int


class GreedyCheck:
    """Compares greedy texts with those of plain decoding.

    Attributes:
        compared: How many texts were compared.
        differences: Those that were not equal.
    """

    def __init__(self) -> None:
        self.compared = 0
        self.differences: list[Difference] = []
        self._plain: dict[int, list[int]] = {}

    def add(self, setting: Setting, traces: Sequence[Trace]) -> None:
        """Take in greedy texts; the first of each request must be plain decoding's."""
        for trace in traces:
            index = trace.request.index
            plain = self._plain.setdefault(index, trace.tokens)
            if plain is trace.tokens:
                continue
            self.compared += 1
            if trace.tokens != plain:
                pairs = enumerate(zip(plain, trace.tokens, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(trace.tokens)))
                self.differences.append(Difference(setting, index, at))


@dataclass
class Results:
    """What was measured, whole or up to an interruption.

    Attributes:
        measured: By setting; those that were measured at least once, in the order of the settings.
        check: The comparison of greedy texts; ``None`` if it was not asked for.
        interrupted: Whether the user stopped it.
    """

    measured: dict[Setting, Measured] = field(default_factory=dict)
    check: GreedyCheck | None = None
    interrupted: bool = False


class Bench:
    """A measurement of an engine; everything a user may have got wrong is found when it is made.

    Args:
        directory: The engine.
        options: What to measure.

    Attributes:
        directory: The engine.
        options: What to measure.
        manifest: The engine's manifest.
        settings: What is compared, in the order of the measurement.
        params: How tokens are chosen.
        requests: The requests of every run.
        distinct_prompts: How many different prompts these have.
        wrapped: How many of the prompts had to repeat text to be as long as asked.

    Raises:
        BundleError, PlanError: The engine cannot be loaded.
        RequestError: It cannot be measured like that; the message has everything of a kind.
    """

    def __init__(self, directory: Path, options: BenchOptions) -> None:
        self.directory = directory
        self.options = options
        self.manifest = read_manifest(directory, ENGINE_BUNDLE)
        graphs = engine_graphs(directory, self.manifest)
        speculators = expand_speculators(options.speculators, graphs)
        _check_settings(options, speculators, self.manifest["options"]["max_sequences"], graphs)
        self.settings = make_settings(options.concurrency, speculators, options.draft_lengths)
        prompts = read_prompts(options.prompts)
        engine = Engine.load(directory, max_sequences=1, threads=options.threads)
        given = {"seed": 0, **options.sampling}
        given |= {"max_tokens": options.output_length, "ignore_eos": options.ignore_eos}
        self.params: SamplingParams = replace(engine.default_params, **given)
        self.params.check_vocabulary(engine.spec.vocab_size)
        tokens = tokenize(prompts, engine, options.input_length)
        count = options.requests or max(len(tokens), 2 * max(options.concurrency))
        self.requests = make_requests(tokens, count, self.params)
        _check_requests(self.requests, engine)
        self.distinct_prompts = len({r.tokens for r in self.requests})
        self.wrapped = sum(t.wrapped for t in tokens[:count])

    @property
    def greedy(self) -> bool:
        """Whether the measured texts themselves are greedy."""
        return self.params.temperature == 0

    def run(self, progress: Progress) -> Results:
        """Measure. An interruption from the keyboard ends it early, without an exception."""
        results = Results(
            {s: Measured() for s in self.settings}, GreedyCheck() if self.options.check else None
        )
        try:
            if results.check and all(s.speculator != NONE for s in self.settings):
                plain = Setting(max(self.options.concurrency), NONE, None)
                self._compare(self._load(plain), plain, results.check, _Steps(progress, "plain decoding"))
            visits = [(r, s) for r in range(self.options.rounds) for s in self.settings]
            for number, (round_, setting) in enumerate(visits, 1):
                streams = "1 stream" if setting.concurrency == 1 else f"{setting.concurrency} streams"
                what = f"{number} of {len(visits)}: {setting.method}, {streams}"
                self._visit(setting, round_, results, _Steps(progress, what))
        except KeyboardInterrupt:
            results.interrupted = True
        results.measured = {s: m for s, m in results.measured.items() if m.rounds}
        return results

    def _load(self, setting: Setting) -> Engine:
        gc.collect()  # the last engine must be gone before this one asks for memory
        return Engine.load(
            self.directory,
            max_sequences=setting.concurrency,
            threads=self.options.threads,
            speculate=setting.speculator,
            draft_length=setting.draft_length,
        )

    def _visit(self, setting: Setting, round_: int, results: Results, steps: _Steps) -> None:
        """Measure a setting once; in the first round generate its greedy texts too, if the others are not."""
        measured = results.measured[setting]
        engine = self._load(setting)
        load = LoadGenerator(engine, setting.concurrency)
        warm_up = setting.concurrency if self.options.warm_up is None else self.options.warm_up
        if warm_up:
            requests = warm_up_requests(self.requests, warm_up)
            load.closed_loop(requests, steps.begin("warming up", len(requests)))
        before, seconds = Drafts.of(engine.acceptance), thread_seconds()
        finished = steps.begin("measuring", len(self.requests))
        if self.options.rate is None:
            traces = load.closed_loop(self.requests, finished)
        else:
            seed = (self.params.seed or 0) + round_
            arrivals = poisson_arrivals(len(self.requests), self.options.rate, seed)
            traces = load.open_loop(self.requests, arrivals, finished)
        measured.drafts += Drafts.of(engine.acceptance) - before
        waited = processor_wait(seconds, thread_seconds())
        measured.rounds.append({**statistics(traces), "processor_wait": waited})
        for category, found in step_yields(traces).items():
            measured.yields[category] = measured.yields.get(category, StepYield()) + found
        if results.check and self.greedy:
            results.check.add(setting, traces)
        elif results.check and round_ == 0:
            self._compare(engine, setting, results.check, steps)

    def _compare(self, engine: Engine, setting: Setting, check: GreedyCheck, steps: _Steps) -> None:
        """Generate the greedy texts for the check."""
        requests = [replace(r, params=replace(r.params, temperature=0)) for r in self.requests]
        finished = steps.begin("checking greedy texts", len(requests))
        check.add(setting, LoadGenerator(engine, setting.concurrency).closed_loop(requests, finished))


class _Steps:
    """Progress within the visit of a setting."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress = progress
        self._what = what

    def begin(self, doing: str, total: int) -> Callable[[], None]:
        """Returns what is to be called when one of `total` requests has ended."""
        done = 0
        what = f"{self._what}, {doing}"
        self._progress(what, done, total)

        def finished() -> None:
            nonlocal done
            done += 1
            self._progress(what, done, total)

        return finished


def expand_speculators(names: Iterable[str], graphs: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of speculators, each once, ``none`` first; ``all`` stands for all that the engine has the graphs for."""
    wanted: list[str] = []
    for name in names:
        wanted += [NONE, *available_speculators(graphs)] if name == ALL else [name]
    return tuple(sorted(dict.fromkeys(wanted), key=lambda name: name != NONE))


def make_settings(
    concurrency: Sequence[int], speculators: Sequence[str], draft_lengths: Sequence[int | None]
) -> list[Setting]:
    """All combinations, but that plain decoding has no draft lengths."""
    return [
        Setting(streams, name, length)
        for streams in dict.fromkeys(concurrency)
        for name in speculators
        for length in ((None,) if name == NONE else dict.fromkeys(draft_lengths))
    ]


def _check_settings(
    options: BenchOptions, speculators: Sequence[str], most: int, graphs: Mapping[str, Any]
) -> None:
    """Raises RequestError for what an engine of `most` sequences cannot do, before anything is loaded."""
    problems = []
    for streams in options.concurrency:
        if not 1 <= streams <= most:
            problems.append(f"concurrency {streams}: the engine was built for 1 to {most} sequences")
    for name, length in [(n, None) for n in speculators] + [(NONE, n) for n in options.draft_lengths]:
        try:
            speculator_kind(name, length, graphs)
        except RequestError as error:
            problems.append(f"{error.headline} {error.hint}".rstrip())
    if options.rate is not None and not (math.isfinite(options.rate) and options.rate > 0):
        problems.append(f"request rate {options.rate}: it must be above 0")
    if problems:
        raise RequestError("The engine cannot be measured as asked:", problems)


def _check_requests(requests: Sequence[Request], engine: Engine) -> None:
    """Raises RequestError for prompts that the engine cannot take, or that leave no room for the output."""
    context, vocabulary = engine.session.context, engine.spec.vocab_size
    problems = []
    longest = max(len(r.tokens) for r in requests)
    output = requests[0].params.max_tokens
    if longest + output - 1 > context:  # the last token is never fed
        problems.append(
            f"a prompt of {longest} tokens and {output} tokens of output need {longest + output - 1} positions; "
            f"the engine has {context}"
        )
    wrong: set[int] = set()
    for request in requests:
        wrong |= {t for t in request.tokens if not 0 <= t < vocabulary}
    if wrong:
        problems.append(f"token ids outside 0..{vocabulary - 1}: {sorted(wrong)[:5]}")
    if problems:
        hint = "Give a shorter --input-len or --output-len, or other prompts."
        raise RequestError("The prompts cannot be run:", problems, hint)
