# SPDX-License-Identifier: Apache-2.0
"""Files of prompts in, files of texts out: ``python -m nemo_build.deploy.ray_serve.batch ENGINE SOURCE OUT``.

A line of the input is a JSON object with ``prompt`` (text or token ids) and, if wanted, ``params``, an object of fields
of :class:`~nemo_build.runtime.SamplingParams`; without a seed, the line's number, counted from 0, is it. A line of the
output is the same object with ``text``, ``token_ids`` and ``finish_reason``, or with ``error``, in the same order. The
input is cut into blocks of lines, which the actors of a Ray Data pipeline work through, each with an engine of its own.
A finished block is a file beside the output; the same work started again goes on with the blocks that are missing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from nemo_build.bundle import (
    ENGINE_BUNDLE,
    publish_file,
    read_json,
    read_manifest,
    sha256_file,
    sha256_json,
    write_json,
)
from nemo_build.deploy.ray_serve.affinity import is_prompt
from nemo_build.deploy.ray_serve.replica import with_params
from nemo_build.errors import RequestError, UserError
from nemo_build.runtime import Engine

_WORK = "work.json"


def run_batch(
    engine: Path,
    source: Path,
    out: Path,
    *,
    actors: int = 1,
    cpus: float = 1,
    gpus: float = 0,
    block: int = 256,
    options: Mapping[str, Any] | None = None,
) -> int:
    """Complete all prompts of a file. Ray is initialized, and paths are the same on all of its nodes.

    Args:
        engine: The engine.
        source: JSON Lines.
        out: What is written.
        actors: Engines at a time.
        cpus: CPUs of each.
        gpus: GPUs of each.
        block: Lines of a block: many more than an engine's sequences, as these are idle at a block's end.
        options: Keyword arguments of :meth:`nemo_build.runtime.Engine.load`.

    Returns:
        Blocks that were computed; those of an earlier run are not.

    Raises:
        UserError: `out` exists, a line is no JSON object, or an earlier run was of another input or engine.
    """
    import ray.data

    if out.exists():
        raise UserError(f"{out} exists.", hint="Choose another name, or remove it.")
    parts = out.parent / f".{out.name}.parts"
    starts = _begin(parts, engine, source, block)
    missing = [{"number": i, "start": s} for i, s in enumerate(starts) if not _part(parts, i).exists()]
    if missing:
        paths = {"source": str(source.resolve()), "parts": str(parts.resolve()), "block": block}
        work = ray.data.from_items(missing, override_num_blocks=len(missing)).map_batches(
            BlockWorker,
            fn_constructor_args=(str(engine.resolve()), paths, dict(options or {})),
            batch_size=1,
            batch_format="numpy",
            compute=ray.data.ActorPoolStrategy(size=min(actors, len(missing))),
            num_cpus=cpus,
            num_gpus=gpus,
        )
        work.materialize()
    _join([_part(parts, i) for i in range(len(starts))], out)
    shutil.rmtree(parts)
    return len(missing)


class BlockWorker:
    """An actor of the pipeline: opens the engine once, then writes a file for each block."""

    def __init__(self, engine: str, paths: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._engine = Engine.load(engine, **options)
        self._source, self._parts = Path(paths["source"]), Path(paths["parts"])
        self._block = int(paths["block"])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number, start in zip(batch["number"], batch["start"], strict=True):
            rows = list(_rows(self._source, int(start), self._block))
            answers = complete(self._engine, rows, int(number) * self._block)
            lines = [json.dumps(row | answer) for row, answer in zip(rows, answers, strict=True)]
            publish_file(_part(self._parts, int(number)), "".join(f"{line}\n" for line in lines))
        return batch


def complete(engine: Engine, rows: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
    """What is to be added to rows.

    Args:
        engine: The engine.
        rows: Objects of the input.
        first: Number of the first one's line.
    """
    answers: list[dict[str, Any]] = [{} for _ in rows]
    good, prompts, params = [], [], []
    for i, row in enumerate(rows):
        if not is_prompt(row.get("prompt")):
            answers[i] = {"error": "there is no prompt that is a text or a list of token ids"}
            continue
        try:
            given = {"seed": first + i, **row.get("params", {})}
            wanted = with_params(engine.default_params, given)
            engine.requests([row["prompt"]], wanted)
        except (RequestError, TypeError) as error:
            answers[i] = {"error": str(error)}
        else:
            good.append(i)
            prompts.append(row["prompt"])
            params.append(wanted)
    for i, done in zip(good, engine.generate(prompts, params) if good else [], strict=True):
        answers[i] = {
            "text": done.text,
            "token_ids": list(done.token_ids),
            "finish_reason": done.finish_reason.value,
        }
    return answers


def _begin(parts: Path, engine: Path, source: Path, block: int) -> list[int]:
    """Where blocks start in the input, once it is sure that finished ones are of this work."""
    starts = [start for number, start in enumerate(_line_starts(source)) if number % block == 0]
    manifest = sha256_json(read_manifest(engine, ENGINE_BUNDLE))
    work = {"input": sha256_file(source), "engine": manifest, "block": block}
    parts.mkdir(parents=True, exist_ok=True)
    if not (parts / _WORK).exists():
        write_json(parts / _WORK, work)
    elif read_json(parts / _WORK) != work:
        raise UserError(
            f"{parts} is of an earlier run with another input, engine or block size.",
            hint="Remove it to begin anew.",
        )
    return starts


def _line_starts(source: Path) -> Iterator[int]:
    """Offsets of the lines. Raises UserError for one that is no JSON object."""
    problems, place = [], 0
    with open(source, "rb") as file:
        for number, line in enumerate(file, 1):
            yield place
            place += len(line)
            try:
                if not isinstance(json.loads(line), dict):
                    problems.append(f"line {number} is no JSON object")
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        raise UserError(f"{source} cannot be used:", problems)


def _rows(source: Path, start: int, count: int) -> Iterator[dict[str, Any]]:
    with open(source, "rb") as file:
        file.seek(start)
        for _, line in zip(range(count), file, strict=False):
            yield json.loads(line)


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number:08d}.jsonl"


def _join(paths: list[Path], out: Path) -> None:
    """Write files into one, which appears when it is whole."""
    holder = out.parent / f".{out.name}.partial"
    with open(holder, "wb") as file:
        for path in paths:
            with open(path, "rb") as part:
                shutil.copyfileobj(part, file)
    os.replace(holder, out)


@click.command()
@click.argument("engine", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--actors", default=1, show_default=True, help="Engines at a time.")
@click.option("--cpus", default=1.0, show_default=True, help="CPUs of each.")
@click.option("--gpus", default=0.0, show_default=True, help="GPUs of each.")
@click.option("--block", default=256, show_default=True, help="Lines of a block.")
@click.option("--max-sequences", type=int, help="Sequences of an engine at a time.")
@click.option("--speculate", default="none", show_default=True, help="Where drafts come from.")
def main(
    engine: Path, source: Path, out: Path, max_sequences: int | None, speculate: str, **how: Any
) -> None:
    """Complete the prompts of SOURCE (JSON Lines) into OUT, on the cluster that this machine belongs to."""
    options = {"max_sequences": max_sequences, "speculate": speculate}
    try:
        done = run_batch(engine, source, out, options=options, **how)
    except UserError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{out} is written; {done} blocks were computed now")


if __name__ == "__main__":
    main()
