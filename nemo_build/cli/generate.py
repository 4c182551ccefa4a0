# SPDX-License-Identifier: Apache-2.0
"""``nemo-build generate``."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from nemo_build.cli._console import check_text, json_option, print_json, read_text
from nemo_build.cli._sampling import (
    acceptance_text,
    sampling_options,
    sampling_params,
    speculation_options,
)


@click.command()
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("prompts", nargs=-1)
@click.option("--threads", type=click.IntRange(1), help="CPU threads  [default: all]")
@speculation_options
@sampling_options
@json_option
def command(
    engine: Path,
    prompts: tuple[str, ...],
    threads: int | None,
    as_json: bool,
    speculate: str,
    draft_length: int | None,
    **options: Any,
) -> None:
    """Continue PROMPTS with an ENGINE; without a prompt, or for "-", standard input is the prompt.

    One prompt is streamed. Several are generated together and printed in order.
    """
    from nemo_build.runtime import Engine

    texts = [
        read_text(sys.stdin.buffer, "standard input") if p == "-" else check_text(p, "the prompt")
        for p in prompts or ("-",)
    ]
    loaded = Engine.load(engine, threads=threads, speculate=speculate, draft_length=draft_length)
    params = sampling_params(loaded.default_params, options)
    start = time.perf_counter()
    if as_json:
        completions = loaded.generate(texts, params)
        seconds = time.perf_counter() - start
        print_json(
            {
                "seconds": round(seconds, 4),
                "acceptance": asdict(loaded.acceptance),
                "completions": [
                    {
                        "prompt": prompt,
                        "text": c.text,
                        "finish_reason": str(c.finish_reason),
                        "prompt_tokens": c.prompt_tokens,
                        "token_ids": list(c.token_ids),
                    }
                    for prompt, c in zip(texts, completions, strict=True)
                ],
            }
        )
        return
    tokens = 0
    if len(texts) == 1:
        stream = loaded.stream(texts[0], params)
        click.echo(texts[0], nl=False)
        for chunk in stream:
            click.echo(chunk.text, nl=False)
            sys.stdout.flush()
            tokens += 1
        click.echo()
    else:
        for prompt, completion in zip(texts, loaded.generate(texts, params), strict=True):
            click.echo(f"{prompt}{completion.text}\n{'-' * 40}")
            tokens += len(completion.token_ids)
    seconds = time.perf_counter() - start
    click.echo(f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s)", err=True)
    if summary := acceptance_text(loaded.acceptance):
        click.echo(summary, err=True)
