# SPDX-License-Identifier: Apache-2.0
"""The Python API: load an engine and generate text."""

from __future__ import annotations

import numbers
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.bundle import ENGINE_BUNDLE, check_files, read_manifest
from nemo_build.engines.plan import PREFILL_CHUNK, host_memory, plan_memory
from nemo_build.engines.session import Session
from nemo_build.errors import BundleError, RequestError
from nemo_build.plugins import native
from nemo_build.runtime.batch import Acceptance, Batch, RunningSequence, Speculation
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.speculation.kinds import ADAPTIVE_DRAFTS, EngineFiles, speculator_kind
from nemo_build.runtime.speculation.lengths import DraftLengthController
from nemo_build.runtime.stopping import FinishReason
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.settings import threads as default_threads
from nemo_build.spec import ModelSpec
from nemo_build.state import StateSpec

if TYPE_CHECKING:
    from nemo_build.runtime.chat import ChatTemplate

Prompt = str | Sequence[int]
"""Text, or token ids."""


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
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    matched: str | int | None
    prompt_tokens: int
    seed: int = field(compare=False)


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed generation.

    Attributes:
        index: Which of the prompts it belongs to.
        text: New text, possibly empty while a character or a stop string is incomplete.
        token_id: The token it came from.
        finish_reason: Set on the last chunk.
        matched: On the last chunk: the stop string, or the id of the end token, that ended it.
    """

    index: int
    text: str
    token_id: int
    finish_reason: FinishReason | None = None
    matched: str | int | None = None


class Engine:
    """An engine bundle, ready to generate. Make one with :meth:`load`.

    Calls of :meth:`generate` and :meth:`stream` may overlap, from several threads too: they share the engine's
    slots, and each gets what it would get alone.

    Attributes:
        directory: The bundle.
        spec: The model.
        tokenizer: Its tokenizer.
        session: The open target graph.
    """

    def __init__(
        self,
        directory: Path,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        session: Session,
        speculation: Speculation | None = None,
    ) -> None:
        self.directory = directory
        self.spec = spec
        self.tokenizer = tokenizer
        self.session = session
        self._batch = Batch(session, speculation)
        self._lock = threading.Lock()

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
    ) -> Engine:
        """Open an engine bundle.

        Args:
            directory: What ``nemo-build build`` wrote.
            max_sequences: Sequences at a time; default and limit are what the engine was built for.
            max_context: Positions per sequence; likewise.
            threads: CPU threads; default: ``NEMO_BUILD_THREADS``, or all CPUs of the process.
            speculate: A name of :data:`~nemo_build.runtime.speculation.kinds.SPECULATORS`, or ``none``. What is
                generated is the same.
            draft_length: Drafts of a sequence in a step; default: as many as pay, by what steps cost and how many
                drafts are accepted.

        Raises:
            BundleError: It is not an engine, or it is damaged or of another version.
            PlanError: It does not fit this machine's memory.
            RequestError: A size is out of range, or the engine does not have what the speculator needs.
        """
        if threads is not None and threads < 1:
            raise RequestError(f"threads is {threads}; it must be at least 1.")
        directory = Path(directory)
        manifest = read_manifest(directory, ENGINE_BUNDLE)
        _check_engine(directory, manifest)
        slots, context = _sizes(manifest["options"], max_sequences, max_context)
        spec = ModelSpec.from_json(manifest["spec"])
        tokenizer = Tokenizer.load(directory)
        kind = speculator_kind(speculate, draft_length, manifest["graphs"])
        most = ADAPTIVE_DRAFTS if draft_length is None else draft_length
        pending = most + 1 if kind else 0
        graphs = ["target", *(kind.graphs if kind else ())]
        states = {s["name"]: s for name in graphs for s in manifest["graphs"][name]["state"]}
        plan_memory(
            spec,
            [StateSpec.from_json(s) for s in states.values()],
            slots=slots,
            context=context,
            weights_file=manifest["plan"]["weights_file"],
            weights_memory=manifest["plan"]["weights_memory"],
            native=native.library() is not None,
            pending=pending,
        ).require(host_memory(), "this machine")
        threads = default_threads() if threads is None else threads
        files = EngineFiles(directory, manifest, {"slots": slots, "context": context, "threads": threads})
        if kind is None:
            return cls(directory, spec, tokenizer, files.session("target"))
        features = {kind.features: True} if kind.features else {}
        session = files.session("target", pending=pending, **features)
        speculator = kind.open(files)
        controller = DraftLengthController(most) if draft_length is None else None
        return cls(directory, spec, tokenizer, session, Speculation(speculator, most, controller))

    @property
    def acceptance(self) -> Acceptance:
        """What came of drafts so far."""
        return self._batch.acceptance

    @cached_property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat template. Raises BundleError if there is none."""
        from nemo_build.runtime.chat import ChatTemplate

        return ChatTemplate.load(self.directory)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text: the checkpoint's, or else the tokenizer's."""
        fallback = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        return self.spec.generation.eos_token_ids or fallback

    @property
    def default_params(self) -> SamplingParams:
        """The checkpoint's own sampling defaults (``generation_config.json``)."""
        wanted = {name: getattr(self.spec.generation, name) for name in ("temperature", "top_p", "top_k")}
        return SamplingParams(**{name: value for name, value in wanted.items() if value is not None})

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
        prefill_chunk: int = PREFILL_CHUNK,
        skip_special_tokens: bool = True,
    ) -> list[Completion]:
        """Complete prompts, as many at a time as the engine has slots.

        Args:
            prompts: One prompt or several; texts or token ids.
            params: For all, or one for each; default :attr:`default_params`.
            prefill_chunk: Most prompt tokens of a sequence in one step.
            skip_special_tokens: Leave control tokens out of the text.

        Returns:
            One completion for each prompt, in order.

        Raises:
            RequestError: A prompt is empty or too long, or token ids are out of range; all are named.
            BundleError: The engine computes logits that are not finite.
        """
        sequences = self._sequences(prompts, params, prefill_chunk, skip_special_tokens)
        texts: list[list[str]] = [[] for _ in sequences]
        ends: dict[int, Chunk] = {}
        for chunk in self._run(sequences):
            texts[chunk.index].append(chunk.text)
            if chunk.finish_reason is not None:
                ends[chunk.index] = chunk
        return [
            Completion(
                "".join(texts[i]),
                tuple(s.output),
                ends[i].finish_reason or FinishReason.CANCELLED,
                ends[i].matched,
                s.prompt_tokens,
                s.seed,
            )
            for i, s in enumerate(sequences)
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefill_chunk: int = PREFILL_CHUNK,
        skip_special_tokens: bool = True,
    ) -> Iterator[Chunk]:
        """Like :meth:`generate`, but yields every token as it comes. Closing the iterator cancels."""
        return self._run(self._sequences(prompts, params, prefill_chunk, skip_special_tokens))

    def _run(self, sequences: Sequence[RunningSequence]) -> Iterator[Chunk]:
        """Step the shared batch until these sequences have ended; other callers' tokens wait in theirs."""
        with self._lock:
            for sequence in sequences:
                self._batch.add(sequence)
        try:
            while True:
                for i, sequence in enumerate(sequences):
                    while sequence.events:
                        token, text = sequence.events.popleft()
                        yield Chunk(i, text.emit, token, text.finish_reason, text.matched)
                    if sequence.error is not None:
                        hint = "Check the engine with `nemo-build inspect --verify`, or build it again."
                        raise BundleError(f"The engine fails: {sequence.error}", hint=hint)
                if all(s.finished and not s.events for s in sequences):
                    return
                with self._lock:
                    if not any(s.events for s in sequences) and self._batch.unfinished:
                        self._batch.step()
        finally:
            with self._lock:
                for sequence in sequences:
                    self._batch.cancel(sequence)

    def _sequences(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        prefill_chunk: int,
        skip_special_tokens: bool,
    ) -> list[RunningSequence]:
        token_lists = [self._tokens(p) for p in _as_list(prompts)]
        if params is None:
            params = self.default_params
        each = [params] * len(token_lists) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(token_lists):
            raise RequestError(f"There are {len(token_lists)} prompts, but {len(each)} sampling parameters.")
        self._check_prompts(token_lists)
        for p in each:
            p.check_vocabulary(self.spec.vocab_size)
        return [
            RunningSequence(
                tokens,
                p,
                eos_ids=self.eos_ids,
                table=self.tokenizer,
                context=self.session.context,
                prefill_chunk=prefill_chunk,
                skip_special_tokens=skip_special_tokens,
            )
            for tokens, p in zip(token_lists, each, strict=True)
        ]

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


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _sizes(options: Mapping[str, int], sequences: int | None, context: int | None) -> tuple[int, int]:
    sequences = options["max_sequences"] if sequences is None else sequences
    context = options["max_context"] if context is None else context
    problems = []
    for name, value in (("max_sequences", sequences), ("max_context", context)):
        if not 1 <= value <= options[name]:
            problems.append(f"{name} is {value}; the engine was built for 1 to {options[name]}")
    if problems:
        raise RequestError("The engine cannot be loaded as asked:", problems)
    return sequences, context


def _check_engine(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Graphs and text files by digest, the weights by size (``inspect --verify`` reads them whole)."""
    check_files(directory, manifest["files"] | {g["file"]: g["sha256"] for g in manifest["graphs"].values()})
    problems = []
    for name in manifest["weights"]["files"]:
        size, path = manifest["sizes"][name], directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            has = "but is missing" if found is None else f"but has {found}"
            problems.append(f"{path} should have {size} bytes, {has}")
    if problems:
        raise BundleError("The engine's weights are damaged:", problems, "Build the engine again.")
