# SPDX-License-Identifier: Apache-2.0
"""The Python API: load an engine and generate text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.bundle import ENGINE_BUNDLE, check_files, read_manifest
from nemo_build.engines.plan import host_memory, plan_memory
from nemo_build.engines.session import Session
from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime.batch import Batch, RunningSequence
from nemo_build.runtime.sampling import SamplingParams
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
        prompt_tokens: Length of the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed generation.

    Attributes:
        index: Which of the prompts it belongs to.
        text: New text, possibly empty while a character or a stop string is incomplete.
        token_id: The token it came from.
        finish_reason: Set on the last chunk.
    """

    index: int
    text: str
    token_id: int
    finish_reason: FinishReason | None = None


class Engine:
    """An engine bundle, ready to generate. Make one with :meth:`load`.

    Attributes:
        directory: The bundle.
        spec: The model.
        tokenizer: Its tokenizer.
        session: The open target graph.
    """

    def __init__(self, directory: Path, spec: ModelSpec, tokenizer: Tokenizer, session: Session) -> None:
        self.directory = directory
        self.spec = spec
        self.tokenizer = tokenizer
        self.session = session

    @classmethod
    def load(
        cls,
        directory: str | Path,
        *,
        max_sequences: int | None = None,
        max_context: int | None = None,
        threads: int | None = None,
    ) -> Engine:
        """Open an engine bundle.

        Args:
            directory: What ``nemo-build build`` wrote.
            max_sequences: Sequences at a time; default and limit are what the engine was built for.
            max_context: Positions per sequence; likewise.
            threads: CPU threads; default: ``NEMO_BUILD_THREADS``, or all CPUs of the process.

        Raises:
            BundleError: It is not an engine, or it is damaged or of another version.
            PlanError: It does not fit this machine's memory.
            RequestError: A size is out of range.
        """
        directory = Path(directory)
        manifest = read_manifest(directory, ENGINE_BUNDLE)
        _check_engine(directory, manifest)
        slots, context = _sizes(manifest["options"], max_sequences, max_context)
        target = manifest["graphs"]["target"]
        plan_memory(
            [StateSpec.from_json(s) for s in target["state"]],
            slots=slots,
            context=context,
            pending=0,
            weights_file=manifest["plan"]["weights_file"],
            weights_memory=manifest["plan"]["weights_memory"],
        ).require(host_memory(), "this machine")

        from nemo_build.engines.ort import OrtSession

        session = OrtSession(
            directory / target["file"],
            slots=slots,
            context=context,
            threads=default_threads() if threads is None else threads,
        )
        return cls(directory, ModelSpec.from_json(manifest["spec"]), Tokenizer.load(directory), session)

    @cached_property
    def template(self) -> ChatTemplate:
        """The checkpoint's chat template. Raises BundleError if there is none."""
        from nemo_build.runtime.chat import ChatTemplate

        return ChatTemplate.load(self.directory)

    @property
    def default_params(self) -> SamplingParams:
        """The checkpoint's own sampling defaults (``generation_config.json``)."""
        wanted = {name: getattr(self.spec.generation, name) for name in ("temperature", "top_p", "top_k")}
        return SamplingParams(**{name: value for name, value in wanted.items() if value is not None})

    def chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """The text of a conversation, up to where the assistant answers.

        Args:
            messages: OpenAI-style messages.
            tools: OpenAI-style tool definitions.
            **kwargs: Passed to the template, for example ``enable_thinking=False``.

        Raises:
            BundleError: The engine has no template.
            RequestError: The template refuses the messages.
        """
        return self.template.render(messages, tools=tools, **kwargs)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefill_chunk: int = 256,
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
        """
        sequences = self._sequences(prompts, params, skip_special_tokens)
        texts: list[list[str]] = [[] for _ in sequences]
        reasons: list[FinishReason] = [FinishReason.CANCELLED] * len(sequences)
        for chunk in self._run(sequences, prefill_chunk):
            texts[chunk.index].append(chunk.text)
            if chunk.finish_reason is not None:
                reasons[chunk.index] = chunk.finish_reason
        return [
            Completion("".join(text), tuple(s.output), reason, s.prompt_tokens)
            for s, text, reason in zip(sequences, texts, reasons, strict=True)
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prefill_chunk: int = 256,
        skip_special_tokens: bool = True,
    ) -> Iterator[Chunk]:
        """Like :meth:`generate`, but yields every token as it comes. Closing the iterator cancels."""
        return self._run(self._sequences(prompts, params, skip_special_tokens), prefill_chunk)

    def _run(self, sequences: Sequence[RunningSequence], prefill_chunk: int) -> Iterator[Chunk]:
        batch = Batch(self.session, prefill_chunk=prefill_chunk)
        index = {id(s): i for i, s in enumerate(sequences)}
        for sequence in sequences:
            batch.add(sequence)
        while batch.unfinished:
            for sequence, text in batch.step():
                yield Chunk(index[id(sequence)], text.emit, sequence.tokens[-1], text.finish_reason)

    def _sequences(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
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
                eos_ids=self.spec.generation.eos_token_ids,
                table=self.tokenizer,
                context=self.session.context,
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
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
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
    weights = directory / manifest["weights"]["file"]
    size = manifest["sizes"][weights.name]
    found = weights.stat().st_size if weights.is_file() else None
    if found != size:
        raise BundleError(
            f"{weights} is damaged: it should have {size} bytes, "
            + ("but is missing." if found is None else f"but has {found}."),
            hint="Build the engine again.",
        )
