# SPDX-License-Identifier: Apache-2.0
"""``nemo-build chat``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nemo_build.cli._sampling import sampling_options, sampling_params

_END_OF_TURN = "<|im_end|>"


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.option("--system", help="System message.")
@click.option("--thinking/--no-thinking", default=True, show_default=True, help="Let the model reason first.")
@click.option("--threads", type=int, help="CPU threads  [default: all]")
@sampling_options
def command(engine: Path, system: str | None, thinking: bool, threads: int | None, **options: Any) -> None:
    """Talk to an ENGINE. "/reset" forgets the conversation, "/exit" (or the end of input) leaves."""
    from nemo_build.runtime import Engine

    loaded = Engine.load(engine, threads=threads)
    params = sampling_params(loaded.default_params, options)
    beginning = [{"role": "system", "content": system}] if system is not None else []
    messages = list(beginning)
    for text in _lines():
        if text == "/reset":
            messages = list(beginning)
            continue
        messages.append({"role": "user", "content": text})
        prompt = loaded.chat_prompt(messages, enable_thinking=thinking)
        answer = ""
        # Control tokens are shown, for the end of the reasoning is one; the end of the turn is not text.
        for chunk in loaded.stream(prompt, params, skip_special_tokens=False):
            shown = chunk.text.replace(_END_OF_TURN, "")
            click.echo(shown, nl=False)
            sys.stdout.flush()
            answer += shown
        click.echo()
        messages.append({"role": "assistant", "content": answer.rpartition("</think>")[2].strip()})


def _lines() -> Iterator[str]:
    """The user's lines, with editing and history where standard input is a terminal."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
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
