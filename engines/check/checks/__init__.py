# SPDX-License-Identifier: Apache-2.0
"""The kinds of checks: one module a kind, found by looking in this folder.

A module defines

- ``NAME``;
- ``Settings``: a frozen dataclass, subclass of :class:`Settings`, whose fields all have defaults;
- ``MEASURED``: the settings that what is measured depends on; with other ones, a record is of no use;
- ``NEEDS_BASELINE``: whether nothing can be said without what was recorded;
- ``HARDWARE``: whether what is measured depends on the machine, so that records of other machines are of no use;
- ``measure(subject, settings) -> dict``: plain data, which ``--record`` keeps;
- ``judge(now, before, settings) -> Judgement``: `before` is what was recorded of the same check, or ``None``;
- ``summary(found) -> dict``: the main figures of what was measured, as numbers, which histories show.

``measure`` raises :class:`Skip` where it cannot be made here, with the reason.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from nemo_build.engines.check.verdict import Figure


class Skip(Exception):
    """A check cannot be made; the message says why."""


@dataclass(frozen=True)
class Settings:
    """Settings of a check; subclasses add theirs."""


@dataclass(frozen=True)
class Judgement:
    """What a check comes to.

    Attributes:
        headline: One sentence.
        figures: What was judged; the check's outcome is the worst of theirs.
        causes: What it is likely to come from.
        details: Data for plots, as plain data.
        where: Part of a name, for example of a layer, that changes are looked for in first.
    """

    headline: str
    figures: list[Figure]
    causes: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    where: str = ""


@cache
def check_kinds() -> Mapping[str, ModuleType]:
    """All kinds by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {m.NAME: m for m in sorted(modules, key=lambda m: str(m.NAME))}
