# SPDX-License-Identifier: Apache-2.0
"""Suites: which checks are made of an engine, and how strict they are. A YAML file::

allow_skip: [speed]           # checks that may be skipped without the whole being so
checks:
  numerics: {}                # a check of that kind with its defaults
  chat_numerics:              # another one of the same kind
    kind: numerics
    kl_mean: 0.01
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from nemo_build.engines.check.checks import Settings, check_kinds
from nemo_build.errors import UserError

DEFAULT = Path(__file__).parent / "suite.yaml"
"""The suite that is used where none is named."""


@dataclass(frozen=True)
class Planned:
    """A check of a suite: its name, its kind, and its settings."""

    name: str
    kind: str
    settings: Settings


@dataclass(frozen=True)
class Suite:
    """What is checked.

    Attributes:
        checks: In order.
        allow_skip: Names of those that may be skipped.
        path: Where it was read from.
    """

    checks: tuple[Planned, ...]
    allow_skip: tuple[str, ...]
    path: Path

    @classmethod
    def load(cls, path: Path = DEFAULT) -> Suite:
        """Read a suite.

        Raises:
            UserError: It is no suite; all that is wrong with it is named.
        """
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise UserError(f"{path} is no YAML: {error}") from error
        problems: list[str] = []
        suite = cls(*_parse(content, problems), path)
        if problems:
            raise UserError(f"{path} is no suite of checks:", problems)
        return suite

    def only(self, names: Sequence[str]) -> Suite:
        """Some of its checks, in its order.

        Raises:
            UserError: It has no such check; all that it has not are named.
        """
        known = [p.name for p in self.checks]
        problems = [_unknown(n, known, "check") for n in names if n not in known]
        if problems:
            raise UserError(f"{self.path} lacks what is asked for:", problems)
        return replace(self, checks=tuple(p for p in self.checks if p.name in names))


def _parse(content: Any, problems: list[str]) -> tuple[tuple[Planned, ...], tuple[str, ...]]:
    if not isinstance(content, Mapping) or not isinstance(content.get("checks"), Mapping):
        problems.append("it has no mapping `checks`")
        return (), ()
    problems += [
        _unknown(k, ["checks", "allow_skip"], "key") for k in set(content) - {"checks", "allow_skip"}
    ]
    planned = [_planned(name, given, problems) for name, given in content["checks"].items()]
    if not planned:
        problems.append("it has no checks")
    allow = content.get("allow_skip") or []
    if not isinstance(allow, list):
        problems.append(f"allow_skip is {allow!r}; it must be a list of names")
        allow = []
    problems += [
        _unknown(n, list(content["checks"]), "check in allow_skip")
        for n in allow
        if n not in content["checks"]
    ]
    return tuple(p for p in planned if p is not None), tuple(map(str, allow))


def _planned(name: str, given: Any, problems: list[str]) -> Planned | None:
    values = dict(given or {}) if isinstance(given, Mapping) or given is None else None
    if values is None:
        problems.append(f"{name} is {given!r}; it must be a mapping of settings")
        return None
    kind = values.pop("kind", name)
    if kind not in check_kinds():
        problems.append(_unknown(str(kind), list(check_kinds()), "kind of check"))
        return None
    settings = check_kinds()[kind].Settings
    known = {f.name: f for f in fields(settings)}
    unknown = [_unknown(k, list(known), f"setting of {name}") for k in values if k not in known]
    wrong = [
        f"{name}.{k} is {v!r}; it must be like {known[k].default!r}"
        for k, v in values.items()
        if k in known and not _fits(v, known[k].default)
    ]
    problems += unknown + wrong
    if unknown or wrong:
        return None
    return Planned(str(name), kind, settings(**{k: _as(v, known[k].default) for k, v in values.items()}))


def _fits(value: Any, default: Any) -> bool:
    """Whether a value is of a setting's type, as its default shows it; a number may stand where none is by default."""
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if default is None:
        return value is None or isinstance(value, (int, float, str))
    if isinstance(default, float):
        return isinstance(value, (int, float))
    if isinstance(default, tuple):
        return isinstance(value, list)
    return isinstance(value, type(default))


def _as(value: Any, default: Any) -> Any:
    return tuple(value) if isinstance(default, tuple) else value


def _unknown(name: str, known: list[str], what: str) -> str:
    near = difflib.get_close_matches(str(name), known, 1)
    return f"there is no {what} {name!r}" + (
        f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
    )
