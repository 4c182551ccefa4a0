# SPDX-License-Identifier: Apache-2.0
"""Baselines: what was recorded of an engine, as small text files that are meant to be committed.

A directory has a file for each kind of engine (:class:`Key`), one for each of these and a machine with what depends on
the machine, and ``waivers.yaml``. Everything in them is plain data; a file's ``history`` tells when and why it changed.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_build.bundle import publish_file
from nemo_build.engines.check.verdict import Waiver
from nemo_build.errors import UserError

FORMAT = 1
WAIVERS = "waivers.yaml"

_KEPT = 20
"""Entries of a file's history that are kept."""


@dataclass(frozen=True)
class Key:
    """What engines are alike: the same is expected of all of them.

    Attributes:
        target: What it is built for.
        backend: What runs it.
        model: Digest of the model's spec, 8 hexadecimal digits.
        weights: How weights are held.
        activations: What projections round their inputs to.
        speculator: The speculator it is checked with.
    """

    target: str
    backend: str
    model: str
    weights: str
    activations: str
    speculator: str

    @property
    def file(self) -> str:
        """Name of its file."""
        return ".".join(re.sub(r"[^\w-]", "_", str(v)) for v in asdict(self).values())


class Baseline:
    """The baselines in a directory.

    Args:
        directory: It need not exist yet.
        key: Of the engine that is checked.
        machine: Fingerprint of this machine.
    """

    def __init__(self, directory: Path, key: Key, machine: str) -> None:
        self.directory, self.key, self.machine = directory, key, machine

    def path(self, *, hardware: bool) -> Path:
        """The file with what depends on the machine, or with all else."""
        name = f"{self.key.file}.on.{self.machine}" if hardware else self.key.file
        return self.directory / f"{name}.yaml"

    def recorded(self, check: str, *, hardware: bool) -> dict[str, Any] | None:
        """What was recorded of a check; ``None`` if nothing was.

        Raises:
            UserError: The file is damaged, or of another version.
        """
        found = self._read(self.path(hardware=hardware))["checks"].get(check)
        return None if found is None else dict(found)

    def facts(self) -> dict[str, Any]:
        """Of the engine that was recorded; empty if none was."""
        found: dict[str, Any] = self._read(self.path(hardware=False))["engine"]
        return found

    def history(self, *, hardware: bool) -> list[dict[str, Any]]:
        """What was recorded before, oldest first."""
        found: list[dict[str, Any]] = self._read(self.path(hardware=hardware))["history"]
        return found

    def write(
        self, measured: Mapping[str, tuple[dict[str, Any], bool]], engine: Mapping[str, Any], why: str
    ) -> list[Path]:
        """Record what was measured.

        Args:
            measured: By check: what was measured, and whether it depends on the machine. Other checks' records stay.
            engine: Facts of the engine.
            why: Why it is recorded anew.

        Returns:
            The files that were written.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        written = []
        for hardware in (False, True):
            new = {name: data for name, (data, depends) in measured.items() if depends == hardware}
            if not new:
                continue
            path = self.path(hardware=hardware)
            old = self._read(path)
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            entry = {"date": today, "why": why, "engine": engine.get("digest", ""), "figures": _figures(new)}
            content = {
                "format": FORMAT,
                "key": asdict(self.key),
                **({"machine": self.machine} if hardware else {}),
                "engine": dict(engine),
                "checks": {**old["checks"], **new},
                "history": [*old["history"], entry][-_KEPT:],
            }
            publish_file(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120))
            written.append(path)
        return written

    def waivers(self) -> list[Waiver]:
        """All waivers, expired ones too.

        Raises:
            UserError: The file is damaged.
        """
        path = self.directory / WAIVERS
        if not path.is_file():
            return []
        try:
            return [Waiver(str(w["name"]), str(w["expires"]), str(w["why"])) for w in _yaml(path) or []]
        except (TypeError, KeyError) as error:
            raise UserError(f"{path} is no list of waivers, each with name, expires and why.") from error

    def waive(self, waiver: Waiver) -> None:
        """Add a waiver; one of the same name is replaced.

        Raises:
            UserError: The date is none, or has gone by.
        """
        if _day(waiver.expires) < datetime.datetime.now(datetime.UTC).date():
            raise UserError(f"{waiver.expires} has gone by; a waiver is for days to come.")
        kept = [w for w in self.waivers() if w.name != waiver.name]
        self.directory.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump([asdict(w) for w in [*kept, waiver]], sort_keys=False, allow_unicode=True)
        publish_file(self.directory / WAIVERS, text)

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            return {"engine": {}, "checks": {}, "history": []}
        found = _yaml(path)
        wanted = ("engine", "checks", "history")
        if not isinstance(found, Mapping) or any(name not in found for name in wanted):
            raise UserError(f"{path} is no baseline.", hint="Record it again: nemo-build check --record.")
        if found.get("format") != FORMAT:
            raise UserError(
                f"{path} has format {found.get('format')}; this version reads {FORMAT}.",
                hint="Record it again: nemo-build check --record.",
            )
        return dict(found)


def expired(waiver: Waiver) -> bool:
    """Whether its last day is over. Raises UserError if its date is none."""
    return _day(waiver.expires) < datetime.datetime.now(datetime.UTC).date()


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{text!r} is no day; it must be like 2027-01-31.") from error


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}") from error


def _figures(measured: Mapping[str, dict[str, Any]]) -> dict[str, float]:
    """The plain numbers of what was measured, which a history's plot shows."""
    return {
        f"{check}.{name}": value
        for check, data in measured.items()
        for name, value in data.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
