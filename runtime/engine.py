# SPDX-License-Identifier: Apache-2.0
"""The Python API: load an engine and generate text."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.errors import RequestError
from nemo_build.runtime.constraints.making import Constraints
from nemo_build.runtime.opening import Opened, Options, open_engine
from nemo_build.runtime.output import Chunk, Completion, completion, take
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.prefix_cache import PrefixCacheStatistics
from nemo_build.runtime.request import Request, Scheduling
from nemo_build.runtime.scheduler import TOKEN_BUDGET, SchedulerStatistics
from nemo_build.runtime.speculation.acceptance import Acceptance
from nemo_build.runtime.speculation.drafting import Drafting
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.spec import ModelSpec

if TYPE_CHECKING:
    from nemo_build.runtime.chat import ChatTemplate

Prompt = str | Sequence[int]
"""Text, or token ids."""


class Engine:
    """An engine bundle, ready to generate. Make one with :meth:`load`.

    Calls of :meth:`generate` and :meth:`stream` may overlap, from several threads too: they share the engine's
    slots, and each gets what it would get alone. For asyncio there is
    :class:`~nemo_build.runtime.async_engine.AsyncEngine`.

    Attributes:
        directory: The bundle.
        spec: The model.
        tokenizer: Its tokenizer.
        session: The open target graph, or where its slots are.
    """

    def __init__(self, directory: Path, opened: Opened) -> None:
        self.directory = directory
        self.spec = ModelSpec.from_json(opened.manifest["spec"])
        self.tokenizer = Tokenizer.load(directory)
        self.session = opened.session
        self._scheduler = opened.scheduler
        self._cache = opened.cache
        self._lock = threading.Lock()  # whoever uses the scheduler has it
        self._free = threading.Condition()  # told when nobody has it any more
        self._listeners: list[Callable[[], None]] = []

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        max_sequences: int | None = None,
        max_context: int | None = None,
        threads: int | None = None,
        speculate: str = "none",
        draft_length: int | None = None,
        drafting: Drafting = "coupled",
        prefix_cache: int = 0,
        token_budget: int = TOKEN_BUDGET,
        memory: int | None = None,
    ) -> Engine:
        """Open an engine bundle.

        Args:
            directory: What ``nemo-build build`` wrote.
            max_sequences: Sequences at a time; default and limit are what the engine was built for.
            max_context: Positions per sequence; likewise.
            threads: CPU threads; default: ``NEMO_BUILD_THREADS``, or all CPUs of the process.
            speculate: A name of :data:`~nemo_build.runtime.speculation.kinds.SPECULATORS`, ``auto`` for the first of
                them that the engine has the graphs for, or ``none``. What is generated is the same.
            draft_length: Drafts of a sequence in a step; default: as many as pay, by what steps cost and how many
                drafts are accepted.
            drafting: How drafts of sampled requests are chosen and verified: ``coupled`` (a seed gives the text that
                it gives without speculation), or rejection sampling by ``token`` or by ``block`` (the same
                distribution of texts); see :mod:`~nemo_build.runtime.speculation.drafting`.
            prefix_cache: Bytes for what common beginnings of prompts lead to; 0: each prompt is computed.
            token_budget: Positions of a step: the fewer, the less a long prompt holds up those who read along.
            memory: Bytes the engine may use; default: those of the machine, or of its control group. If not all
                sequences can have a full context, as many run as there is memory for what they hold.

        Raises:
            BundleError: It is not an engine, or it is damaged or of another version.
            PlanError: Not even one sequence fits the memory.
            RequestError: A size is out of range, or the engine does not have what the speculator needs.
        """
        options = Options(
            max_sequences,
            max_context,
            threads,
            speculate,
            draft_length,
            drafting,
            prefix_cache,
            token_budget,
            memory,
        )
        return cls(Path(directory), open_engine(Path(directory), options))

    @property
    def acceptance(self) -> Acceptance:
        """What came of drafts so far."""
        return self._scheduler.acceptance

    def statistics(self) -> SchedulerStatistics:
        """What the scheduler does at the moment, and has done."""
        return self._scheduler.statistics()

    def cache_statistics(self) -> PrefixCacheStatistics:
        """What the prefix cache holds, and how much it saved; all zero without one."""
        return PrefixCacheStatistics() if self._cache is None else self._cache.statistics()

    @cached_property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat template. Raises BundleError if there is none."""
        from nemo_build.runtime.chat import ChatTemplate

        return ChatTemplate.load(self.directory)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the checkpoint's, or else the tokenizer's."""
        return end_ids(self.spec, self.tokenizer)

    @cached_property
    def constraints(self) -> Constraints:
        """Makes what requests with a grammar or a thinking budget obey."""
        return Constraints(self.tokenizer, self.spec.vocab_size, self.eos_ids)

    @property
    def default_params(self) -> SamplingParams:
        """The checkpoint's own sampling defaults (``generation_config.json``)."""
        return SamplingParams.of_checkpoint(self.spec.generation)

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> list[int]:
        """The tokens of a conversation, up to where the assistant answers.

        The template writes all control tokens itself; none is added. Names of control tokens in a message become
        those tokens, as in transformers.

        Args:
            messages: OpenAI-style messages.
            tools: OpenAI-style tool definitions.
            **kwargs: Passed to the template, for example ``enable_thinking=False``.

        Raises:
            BundleError: The engine has no template.
            RequestError: The template refuses the messages.
        """
        return self.tokenizer.encode(self.template.render(messages, tools=tools, **kwargs))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        scheduling: Scheduling | None = None,
        skip_special_tokens: bool = True,
    ) -> list[Completion]:
        """Complete prompts, as many at a time as the engine has slots.

        Args:
            prompts: One prompt or several; texts or token ids.
            params: For all, or one for each; default :attr:`default_params`.
            scheduling: Priority, timeout and the like, for all.
            skip_special_tokens: Leave control tokens out of the text.

        Returns:
            One completion for each prompt, in order.

        Raises:
            RequestError: A prompt is empty or too long, or token ids are out of range; all are named. Or a grammar is
                invalid, or not supported.
            BundleError: The engine computes logits that are not finite.
        """
        requests = self.requests(prompts, params, scheduling, skip_special_tokens)
        chunks: list[list[Chunk]] = [[] for _ in requests]
        for chunk in self._run(requests):
            chunks[chunk.index].append(chunk)
        return [completion(r, c) for r, c in zip(requests, chunks, strict=True)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        scheduling: Scheduling | None = None,
        skip_special_tokens: bool = True,
    ) -> Iterator[Chunk]:
        """Like :meth:`generate`, but yields every token as it comes. Closing the iterator cancels."""
        return self._run(self.requests(prompts, params, scheduling, skip_special_tokens))

    # --- for fronts ------------------------------------------------------------------------------------------

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        scheduling: Scheduling | None = None,
        skip_special_tokens: bool = True,
    ) -> list[Request]:
        """Checked requests for :meth:`add`; arguments and errors are those of :meth:`generate`."""
        token_lists = [self._tokens(p) for p in _as_list(prompts)]
        if params is None:
            params = self.default_params
        each = [params] * len(token_lists) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(token_lists):
            raise RequestError(f"There are {len(token_lists)} prompts, but {len(each)} sampling parameters.")
        self._check_prompts(token_lists)
        for p in each:
            p.check_vocabulary(self.spec.vocab_size)
        guides = [self.constraints.guide(p) for p in each]
        return [
            Request(
                tokens,
                p,
                eos_ids=self.eos_ids,
                table=self.tokenizer,
                context=self.session.context,
                scheduling=scheduling,
                skip_special_tokens=skip_special_tokens,
                guide=guide,
            )
            for tokens, p, guide in zip(token_lists, each, guides, strict=True)
        ]

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests; whoever wants their tokens calls :meth:`step`. Never waits for a step."""
        for request in requests:
            self._scheduler.add(request)

    def cancel(self, requests: Sequence[Request]) -> None:
        """End requests, if they have not ended, before the next step. Never waits for a step."""
        for request in requests:
            if not request.finished:
                self._scheduler.cancel(request)

    @property
    def unfinished(self) -> bool:
        """Whether a request waits, runs, or is to be cancelled."""
        return self._scheduler.unfinished

    def step(self, unless: Callable[[], bool] = bool) -> None:
        """Run one step of the scheduler, if there is anything to do; what comes of it is in the requests' events.

        One thread does at a time; the others wait for it.

        Args:
            unless: Asked before, and after each step of another thread: whether this one needs no step any more.
        """
        is_ours = False
        try:
            with self._free:
                while not (is_ours or unless()):
                    is_ours = self._lock.acquire(blocking=False)
                    if not is_ours:
                        self._free.wait()
            if is_ours and self._scheduler.unfinished:
                self._scheduler.step()
        finally:
            if is_ours:
                self._release()
                self._reap()
                for notify in list(self._listeners):
                    notify()

    def listen(self, notify: Callable[[], None]) -> None:
        """Have something called after each step, in the thread that made it. It must not wait."""
        self._listeners.append(notify)

    def unlisten(self, notify: Callable[[], None]) -> None:
        """The inverse of :meth:`listen`."""
        self._listeners.remove(notify)

    def _run(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Step the scheduler until these requests have ended."""
        self.add(requests)
        try:
            while True:
                for i, request in enumerate(requests):
                    yield from take(request, i)
                if all(r.finished and not r.events for r in requests):
                    return
                failed = self._scheduler.failed
                try:
                    self.step(unless=lambda: any(r.events or r.error for r in requests))
                except Exception:
                    # Those that ran have ended with it, which their readers are told; ours may have waited only.
                    if self._scheduler.failed == failed:
                        raise
        finally:
            self.cancel(requests)
            self._reap()

    def _reap(self) -> None:
        """End what was cancelled, unless a thread steps, which does it afterwards.

        It does not wait for that: a stream that nobody refers to is closed by the garbage collector, perhaps in the
        very thread that steps.
        """
        while self._scheduler.cancelling and self._lock.acquire(blocking=False):
            try:
                self._scheduler.reap()
            finally:
                self._release()

    def _release(self) -> None:
        self._lock.release()
        with self._free:
            self._free.notify_all()

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return [int(t) for t in prompt]
        return self.tokenizer.encode(prompt, add_special_tokens=True)

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        problems = []
        for i, tokens in enumerate(prompts):
            wrong = sorted({t for t in tokens if not 0 <= t < self.spec.vocab_size})
            if not tokens:
                problems.append(f"prompt {i} has no tokens")
            elif len(tokens) > self.session.context:
                problems.append(
                    f"prompt {i} has {len(tokens)} tokens; the engine's context is {self.session.context}"
                )
            if wrong:
                problems.append(
                    f"prompt {i} has token ids outside 0..{self.spec.vocab_size - 1}: {wrong[:5]}"
                )
        if problems:
            raise RequestError("The prompts cannot be run:", problems)


def end_ids(spec: ModelSpec, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end a text: the checkpoint's, or else the tokenizer's."""
    fallback = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    return spec.generation.eos_token_ids or fallback


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
