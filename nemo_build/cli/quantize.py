# SPDX-License-Identifier: Apache-2.0
"""``nemo-build quantize``."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from nemo_build.cli._console import bars, force_option, json_option, print_json, size
from nemo_build.errors import UserError

if TYPE_CHECKING:
    from nemo_build.export.quantize.evaluation import Evaluation
    from nemo_build.export.quantize.quantizer import QuantizeResult
    from nemo_build.export.quantize.texts import Texts
    from nemo_build.runtime.tokenizer import Tokenizer


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="Directory of the new checkpoint."
)
@click.option("--recipe", "recipe_name", required=True, help="A shipped recipe's name, or a YAML file.")
@click.option(
    "--calib",
    metavar="TEXT",
    help="Text to calibrate on: a file (.jsonl with text, or plain text), or a data set as "
    "NAME[:SPLIT][,config=NAME][,column=NAME][,revision=NAME]  [default: a short one of ours]",
)
@click.option(
    "--calib-samples", type=click.IntRange(1), default=128, show_default=True, help="Most sequences of it."
)
@click.option(
    "--calib-length", type=click.IntRange(2), default=512, show_default=True, help="Most tokens of each."
)
@click.option(
    "--min-coverage",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Fail if fewer tokens of the text choose some expert.",
)
@click.option(
    "--engine",
    type=click.Choice(["streaming", "modelopt"]),
    help="Who quantizes  [default: streaming, where the recipe allows]",
)
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Processes that pack.")
@click.option(
    "--evaluate/--no-evaluate",
    default=True,
    show_default=True,
    help="Compare the result with the original, if both fit in memory.",
)
@click.option(
    "--eval",
    "eval_text",
    metavar="TEXT",
    help="Text to compare them on  [default: the calibration text]",
)
@force_option
@json_option
def command(
    checkpoint: Path,
    out: Path,
    recipe_name: str,
    calib: str | None,
    calib_samples: int,
    calib_length: int,
    min_coverage: int,
    engine: Literal["streaming", "modelopt"] | None,
    workers: int,
    evaluate: bool,
    eval_text: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Quantize a CHECKPOINT into ModelOpt's layout, in bounded memory.

    A job that was stopped goes on where it was when it is started again.
    """
    from nemo_build.engines.compare import compare_checkpoints
    from nemo_build.export.quantize.calibration import DEFAULT_TEXT
    from nemo_build.export.quantize.quantizer import quantize_checkpoint
    from nemo_build.export.quantize.recipe import load_recipe
    from nemo_build.export.quantize.report import build_report, write_report
    from nemo_build.export.quantize.texts import open_texts
    from nemo_build.runtime.tokenizer import Tokenizer

    recipe = load_recipe(recipe_name)
    text = open_texts(calib or str(DEFAULT_TEXT))
    eval_on = open_texts(eval_text) if eval_text else text
    sequences: list[list[int]] = []
    compared: list[list[int]] = []
    if recipe.needs_calibration or evaluate:
        tokenizer = Tokenizer.load(checkpoint)
        sequences = _tokens(tokenizer, text, calib_samples, calib_length)
        compared = _tokens(tokenizer, eval_on, calib_samples, calib_length) if eval_text else sequences
    with bars() as progress:
        result = quantize_checkpoint(
            checkpoint,
            out,
            recipe,
            sequences=sequences,
            sequences_source=text.name,
            engine=engine,
            workers=workers,
            min_coverage=min_coverage,
            force=force,
            progress=progress,
        )
        comparison, skipped = None, "it was not asked for"
        if evaluate:
            try:
                comparison, skipped = compare_checkpoints(checkpoint, out, compared, progress)
            except UserError as error:
                skipped = error.headline
    report = build_report(result, comparison, skipped, text.dataset, eval_on.dataset)
    write_report(out, report)
    if as_json:
        print_json(report)
        return
    _tell(result, comparison, skipped)


def _tokens(tokenizer: Tokenizer, text: Texts, samples: int, length: int) -> list[list[int]]:
    """Token ids of the first texts, cut to a length."""
    tokens = (tokenizer.encode(t)[:length] for t in islice(text.texts, samples))
    found = [t for t in tokens if len(t) > 1]
    if not found:
        raise UserError(f"The text {text.name} has no sequence of at least two tokens.")
    return found


def _tell(result: QuantizeResult, comparison: Evaluation | None, skipped: str) -> None:
    """Say what was done, for people."""
    from nemo_build.export.quantize.report import JSON_NAME

    out = result.out
    before, after = sum(result.before.values()), sum(result.after.values())
    click.echo(f"{out}: {len(result.assignments)} projections, {size(before)} -> {size(after)}")
    if result.calibration:
        unreached = sum(map(len, result.calibration.unreached().values()))
        click.echo(
            f"calibrated on {result.calibration.tokens} tokens of {result.calibration.source}"
            + (f"; {unreached} experts were not reached (listed in {JSON_NAME})" if unreached else "")
        )
    if comparison:
        click.echo(
            f"against the original: KL mean {comparison.kl_mean:.5f}, p99 {comparison.kl_p99:.4f}, "
            f"same top token {100 * comparison.top1:.2f} %, "
            f"perplexity {comparison.perplexity_original:.4f} -> {comparison.perplexity:.4f}"
        )
    else:
        click.echo(f"not compared with the original: {skipped}")
