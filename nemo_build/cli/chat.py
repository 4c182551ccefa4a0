# SPDX-License-Identifier: Apache-2.0
"""``nemo-build chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nemo_build.cli._console import read_text
from nemo_build.cli._sampling import sampling_options, sampling_params, speculation_options
from nemo_build.errors import RequestError

if TYPE_CHECKING:
    from nemo_build.runtime import Engine, SamplingParams


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--system", help="System message.")
@click.option("--thinking/--no-thinking", default=True, show_default=True, help="Let the model reason first.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads  [default: all]")
@speculation_options
@sampling_options
def command(
    engine: Path,
    system: str | None,
    thinking: bool,
    threads: int | None,
    speculate: str,
    draft_length: int | None,
    **options: Any,
) -> None:
    """Talk to an ENGINE. "/reset" forgets the conversation, "/exit" (or the end of input) leaves."""
    from nemo_build.runtime import Engine

    loaded = Engine.load(engine, threads=threads, speculate=speculate, draft_length=draft_length)
    params = sampling_params(loaded.default_params, options)
    beginning = [{"role": "system", "content": system}] if system is not None else []
    messages = list(beginning)
    for text in _lines():
        if text == "/reset":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _answer(loaded, loaded.chat_prompt(messages, enable_thinking=thinking), params)
        except RequestError as error:
            click.echo(f"error: {error}\nThe message is dropped; /reset begins a new conversation.", err=True)
            messages.pop()
            continue
        reasoning, closed, content = answer.rpartition("</think>")
        if thinking and not closed:
            reasoning, content = content, ""  # cut off before the reasoning ended
        messages.append(
            {"role": "assistant", "reasoning_content": reasoning.strip(), "content": content.strip()}
        )


def _answer(engine: Engine, prompt: list[int], params: SamplingParams) -> str:
    """Stream an answer to the terminal; returns its text.

    Control tokens are shown, for the end of the reasoning is one. The token that ends the turn never is text.
    """
    answer = ""
    for chunk in engine.stream(prompt, params, skip_special_tokens=False):
        click.echo(chunk.text, nl=False)
        sys.stdout.flush()
        answer += chunk.text
    click.echo()
    return answer


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
