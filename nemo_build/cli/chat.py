# SPDX-License-Identifier: Apache-2.0
"""``nemo-build chat``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_build.cli._console import read_text
from nemo_build.cli._sampling import (
    acceptance_text,
    sampling_options,
    sampling_params,
    speculation_options,
)
from nemo_build.errors import RequestError

if TYPE_CHECKING:
    from nemo_build.runtime import Chunk, Engine, SamplingParams
    from nemo_build.runtime.chat import Delta

_HELP = """\
/think on|off  let the model reason first, or not
/reset         forget the conversation
/help          this list
/exit          leave (as does the end of input)"""


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--system", help="System message.")
@click.option(
    "--thinking/--no-thinking",
    default=None,
    help="Let the model reason first.  [default: as the template does]",
)
@click.option(
    "--thinking-budget",
    type=click.IntRange(0),
    metavar="N",
    help="Most tokens of reasoning, up to the end of a line.",
)
@click.option(
    "--reasoning-effort",
    metavar="EFFORT",
    help="none, minimal, low, medium, high, xhigh or max, as far as the template can tell the model.",
)
@click.option("--stats", is_flag=True, help="Show tokens per second and acceptance after each answer.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads  [default: all]")
@speculation_options
@sampling_options
def command(
    engine: Path,
    system: str | None,
    thinking: bool | None,
    thinking_budget: int | None,
    reasoning_effort: str | None,
    stats: bool,
    threads: int | None,
    speculate: str,
    draft_length: int | None,
    **options: Any,
) -> None:
    """Talk to an ENGINE. "/help" lists what else can be typed. Reasoning is dimmed in a terminal; elsewhere a line
    "</think>" ends it.
    """
    from nemo_build.runtime import Engine
    from nemo_build.runtime.chat import template_variables

    loaded = Engine.load(engine, threads=threads, speculate=speculate, draft_length=draft_length)
    params = sampling_params(loaded.default_params, options)
    template_variables(
        loaded.template, reasoning_effort=reasoning_effort
    )  # says what is wrong before anybody types
    beginning = [{"role": "system", "content": system}] if system is not None else []
    talk = _Talk(loaded, params, thinking, thinking_budget, reasoning_effort, stats, list(beginning))
    for text in _lines():
        word, *arguments = text.split()
        if text == "/reset":
            talk.messages = list(beginning)
        elif text == "/help":
            click.echo(_HELP)
        elif word == "/think":
            if arguments not in (["on"], ["off"]):
                click.echo("/think takes on or off.", err=True)
            else:
                talk.thinking = arguments == ["on"]
        else:
            talk.say(text)


@dataclass
class _Talk:
    """A conversation and how it is led."""

    engine: Engine
    params: SamplingParams
    thinking: bool | None
    budget: int | None
    effort: str | None
    stats: bool
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Say something, and show the answer while it comes. What cannot be answered is forgotten."""
        self.messages.append({"role": "user", "content": text})
        try:
            self.messages.append(self._answer())
        except RequestError as error:
            click.echo(f"error: {error}\nThe message is dropped; /reset begins a new conversation.", err=True)
            self.messages.pop()

    def _answer(self) -> dict[str, str]:
        from nemo_build.runtime import Thinking
        from nemo_build.runtime.chat import AnswerParser, opens_thinking, template_variables

        template = self.engine.template
        variables = template_variables(template, enable_thinking=self.thinking, reasoning_effort=self.effort)
        prompt = template.render(self.messages, **variables)
        thinks = opens_thinking(prompt)
        params = self.params
        if thinks and self.budget is not None:
            params = replace(params, thinking=Thinking.with_grace(self.budget))
        parser, shown = AnswerParser(thinking=thinks), _Shown()
        watch = _Watch(self.engine)
        for chunk in self.engine.stream(
            self.engine.tokenizer.encode(prompt), params, skip_special_tokens=False
        ):
            watch.count(chunk)
            shown.add(parser.push(chunk.text))
        shown.add(parser.finish())
        click.echo()
        if self.stats:
            click.echo(watch.report(), err=True)
        return {"role": "assistant", "reasoning_content": shown.reasoning, "content": shown.content}


class _Shown:
    """What was shown of an answer."""

    def __init__(self) -> None:
        from rich.console import Console

        self.reasoning = ""
        self.content = ""
        self._console = Console()

    def add(self, deltas: Sequence[Delta]) -> None:
        """Show what is new."""
        from nemo_build.runtime.chat import Content, Reasoning

        for delta in deltas:
            if isinstance(delta, Reasoning):
                self.reasoning += delta.text
                self._write(delta.text, style="dim")
            elif isinstance(delta, Content):
                if self.reasoning and not self.content:
                    line_end = "" if self.reasoning.endswith("\n") else "\n"
                    self._write(line_end + ("\n" if self._console.is_terminal else "</think>\n"))
                self.content += delta.text
                self._write(delta.text)
        sys.stdout.flush()

    def _write(self, text: str, style: str | None = None) -> None:
        if self._console.is_terminal:
            self._console.out(text, style=style, end="", highlight=False)
        else:
            click.echo(text, nl=False)


class _Watch:
    """Times an answer, and counts its tokens and drafts."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._before = deepcopy(engine.acceptance)
        self._start = time.perf_counter()
        self._first: float | None = None
        self._tokens = 0

    def count(self, chunk: Chunk) -> None:
        """A piece came, of a token or of none."""
        self._tokens += chunk.token_id is not None
        if self._first is None:
            self._first = time.perf_counter() - self._start

    def report(self) -> str:
        """For people."""
        from nemo_build.runtime.speculation.acceptance import Acceptance

        seconds = time.perf_counter() - self._start
        lines = [f"{self._tokens} tokens in {seconds:.2f} s ({self._tokens / seconds:.1f} tokens/s)"]
        if self._first is not None:
            lines[0] += f", the first after {self._first:.2f} s"
        now, before = self._engine.acceptance, self._before
        drafted, accepted = (
            [n - b for n, b in zip_longest(new, old, fillvalue=0)]
            for new, old in ((now.drafted, before.drafted), (now.accepted, before.accepted))
        )
        places = sum(n > 0 for n in drafted)
        drafts = Acceptance(now.steps - before.steps, drafted[:places], accepted[:places])
        return "\n".join(lines + [text for text in [acceptance_text(drafts)] if text])


def _lines() -> Iterator[str]:
    """The user's lines, with editing and history where standard input is a terminal."""
    if not sys.stdin.isatty():
        for line in read_text(sys.stdin.buffer, "standard input").splitlines():
            if line.strip() == "/exit":
                return
            if line.strip():
                click.echo(f"> {line.strip()}")
                yield line.strip()
        return
    import readline  # noqa: F401  (importing it gives input() editing and history)

    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            click.echo()
            return
        if text == "/exit":
            return
        if text:
            yield text
