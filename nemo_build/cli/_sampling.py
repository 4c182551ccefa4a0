# SPDX-License-Identifier: Apache-2.0
"""The sampling options that ``generate`` and ``chat`` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from nemo_build.runtime.params import SamplingParams

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


def sampling_params(defaults: SamplingParams, options: dict[str, Any]) -> SamplingParams:
    """The checkpoint's defaults with what the user gave. Raises RequestError for values out of range."""
    given = {name: value for name, value in options.items() if value not in (None, ())}
    return replace(defaults, **given)
