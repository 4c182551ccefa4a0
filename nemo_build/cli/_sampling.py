# SPDX-License-Identifier: Apache-2.0
"""Options that verbs share: of sampling, of speculation, and of opening an engine for a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from nemo_build.cli._console import byte_size

if TYPE_CHECKING:
    from nemo_build.runtime.params import SamplingParams
    from nemo_build.runtime.speculation.acceptance import Acceptance

_Command = TypeVar("_Command", bound=Callable[..., Any])

_OPTIONS = (
    click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens to generate."),
    click.option("--temperature", type=float, help="0 is greedy  [default: the checkpoint's]"),
    click.option("--top-p", type=float, help="Nucleus mass  [default: the checkpoint's]"),
    click.option("--top-k", type=int, help="Most likely tokens kept  [default: the checkpoint's]"),
    click.option("--min-p", type=float, help="Drop tokens below this fraction of the most likely one."),
    click.option("--repetition-penalty", type=float, help="Divide the logits of tokens seen before."),
    click.option(
        "--presence-penalty", type=float, help="Subtract from the logits of tokens generated before."
    ),
    click.option("--frequency-penalty", type=float, help="The same, times how often."),
    click.option("--seed", type=int, help="Same seed, same text."),
    click.option("--stop", multiple=True, help="Stop at this text; may be given several times."),
)


def sampling_options(function: _Command) -> _Command:
    """Add the options; the command gets them as keyword arguments for :func:`sampling_params`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def speculation_options(function: _Command) -> _Command:
    """Add ``--speculate`` and ``--draft-len``; the command gets what :meth:`Engine.load` takes, by its names."""
    for option in (
        click.option(
            "--draft-len",
            "draft_length",
            default="auto",
            show_default=True,
            metavar="N|auto",
            callback=_draft_length,
            help="Drafts in a step; auto: as many as pay.",
        ),
        click.option(
            "--speculate",
            default="none",
            show_default=True,
            metavar="NAME",
            help="Where drafts come from: a speculator that the engine has, such as mtp or dspark; auto: the first of "
            "them; none. The text is the same.",
        ),
    ):
        function = option(function)
    return function


_SERVING = (
    click.option("--max-sequences", type=int, help="Sequences at a time  [default: the engine's]"),
    click.option("--max-context", type=int, help="Positions a sequence  [default: the engine's]"),
    click.option(
        "--prefix-cache",
        default="0",
        callback=byte_size,
        show_default=True,
        metavar="SIZE",
        help="Memory for what common beginnings of prompts lead to, for example 2G.",
    ),
    click.option(
        "--token-budget", type=click.IntRange(1), default=512, show_default=True, help="Positions of a step."
    ),
)


def serving_options(function: _Command) -> _Command:
    """Add what servers open an engine with, speculation included; names are those of :meth:`Engine.load`."""
    for option in reversed(_SERVING):
        function = option(function)
    return speculation_options(function)


def acceptance_text(acceptance: Acceptance) -> str:
    """What came of the drafts, for people; empty if there were none."""
    if not acceptance.steps:
        return ""
    shares = ", ".join(f"{a / d:.0%}" for a, d in zip(acceptance.accepted, acceptance.drafted, strict=True))
    return f"acceptance length {acceptance.length:.2f}; drafts accepted by position: {shares}"


def _draft_length(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """A whole number; None for ``auto``."""
    if value == "auto":
        return None
    if not value.isdecimal() or len(value) > 4:
        raise click.BadParameter(f"{value!r} is neither a whole number nor auto", ctx=ctx, param=param)
    return int(value)


def sampling_params(defaults: SamplingParams, options: dict[str, Any]) -> SamplingParams:
    """The checkpoint's defaults with what the user gave. Raises RequestError for values out of range."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    return replace(defaults, **given)
