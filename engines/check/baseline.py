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

from nemo_build.bundle import publish_file, sha256_json
from nemo_build.engines.check.plain import plain
from nemo_build.engines.check.verdict import Waiver
from nemo_build.errors import UserError

FORMAT = 1
WAIVERS = "waivers.yaml"

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the same, in C where PyYAML was built with it

_KEPT = 20
"""Entries of a file's history that are kept."""


@dataclass(frozen=True)
class Key:
    """What engines are alike: the same is expected of all of them.

    Attributes:
        target: What it is built for.
        backend: What runs it.
        model: Digest of the model's architecture and size, 8 hexadecimal digits.
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


@dataclass(frozen=True)
class Record:
    """What was recorded of a check: with which settings, and what was found; both plain data."""

    settings: dict[str, Any]
    found: dict[str, Any]


@dataclass(frozen=True)
class Measurement:
    """What is to be recorded of a check.

    Attributes:
        record: As it is kept.
        summary: Its main figures, which the history keeps.
        hardware: Whether it depends on the machine.
    """

    record: Record
    summary: dict[str, float]
    hardware: bool


class Baseline:
    """The baselines in a directory.

    Args:
        directory: It need not exist yet.
        key: Of the engine that is checked.
        machine: Facts of this machine; figures of speed are compared only between machines of which these are equal.
    """

    def __init__(self, directory: Path, key: Key, machine: Mapping[str, Any]) -> None:
        self.directory, self.key, self.machine = directory, key, machine
        self.fingerprint = fingerprint(machine)

    def path(self, *, hardware: bool) -> Path:
        """The file with what depends on the machine, or with all else."""
        name = f"{self.key.file}.on.{self.fingerprint}" if hardware else self.key.file
        return self.directory / f"{name}.yaml"

    def recorded(self, check: str, *, hardware: bool) -> Record | None:
        """What was recorded of a check; ``None`` if nothing was.

        Raises:
            UserError: The file is damaged, or of another version.
        """
        found = self._read(self.path(hardware=hardware))["checks"].get(check)
        try:
            return None if found is None else Record(dict(found["settings"]), dict(found["found"]))
        except (TypeError, KeyError, ValueError) as error:
            raise self._damaged(self.path(hardware=hardware)) from error

    def facts(self) -> dict[str, Any]:
        """Of the engine that was recorded; empty if none was."""
        found: dict[str, Any] = self._read(self.path(hardware=False))["engine"]
        return found

    def history(self, *, hardware: bool) -> list[dict[str, Any]]:
        """What was recorded before, oldest first."""
        found: list[dict[str, Any]] = self._read(self.path(hardware=hardware))["history"]
        return found

    def write(self, measured: Mapping[str, Measurement], engine: Mapping[str, Any], why: str) -> list[Path]:
        """Record what was measured.

        Args:
            measured: By check. Other checks' records stay.
            engine: Facts of the engine.
            why: Why it is recorded.

        Returns:
            The files that were written.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        written = []
        for hardware in (False, True):
            new = {name: m for name, m in measured.items() if m.hardware == hardware}
            if not new:
                continue
            path = self.path(hardware=hardware)
            old = self._read(path)
            figures = {f"{n}.{k}": v for n, m in new.items() for k, v in m.summary.items()}
            entry = {"date": today().isoformat(), "why": why, "engine": engine["digest"], "figures": figures}
            content = {
                "format": FORMAT,
                "key": asdict(self.key),
                **({"machine": dict(self.machine)} if hardware else {}),
                "engine": dict(engine),
                "checks": {**old["checks"], **{name: asdict(m.record) for name, m in new.items()}},
                "history": [*old["history"], entry][-_KEPT:],
            }
            text = yaml.safe_dump(
                plain(content), sort_keys=False, allow_unicode=True, width=118, default_flow_style=None
            )
            publish_file(path, text)
            written.append(path)
        return written

    def others(self) -> list[str]:
        """Names of baselines of engines of another kind."""
        mine = self.path(hardware=False).name
        return sorted(
            p.name
            for p in self.directory.glob("*.yaml")
            if ".on." not in p.name and p.name not in (mine, WAIVERS)
        )

    def unlike(self) -> list[str]:
        """For each other machine with a record of such an engine: in what it differs from this one."""
        found = []
        for path in sorted(self.directory.glob(f"{self.key.file}.on.*.yaml")):
            there = self._read(path)["machine"]
            names = sorted(n for n in {*there, *self.machine} if there.get(n) != self.machine.get(n))
            parts = [f"{n} there is {there.get(n)!r}, here {self.machine.get(n)!r}" for n in names]
            if parts:
                found.append(f"{path.name}: {'; '.join(parts)}")
        return found

    def _read(self, path: Path) -> dict[str, Any]:
        if not path.is_file():
            return {"engine": {}, "checks": {}, "history": []}
        found = _yaml(path)
        wanted = {"engine": Mapping, "checks": Mapping, "history": list}
        if ".on." in path.name:
            wanted["machine"] = Mapping
        if not isinstance(found, Mapping) or any(not isinstance(found.get(n), t) for n, t in wanted.items()):
            raise self._damaged(path)
        if found.get("format") != FORMAT:
            raise UserError(
                f"{path} has format {found.get('format')}; this version reads {FORMAT}.",
                hint="Remove it and record it again: nemo-build check --record.",
            )
        return dict(found)

    def _damaged(self, path: Path) -> UserError:
        return UserError(
            f"{path} is no baseline.", hint="Remove it and record it again: nemo-build check --record."
        )


class Waivers:
    """The waivers in a directory of baselines."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / WAIVERS

    def all(self) -> list[Waiver]:
        """All of them, expired ones too.

        Raises:
            UserError: The file is damaged.
        """
        if not self.path.is_file():
            return []
        try:
            found = [Waiver(str(w["name"]), str(w["expires"]), str(w["why"])) for w in _yaml(self.path) or []]
        except (TypeError, KeyError) as error:
            raise UserError(f"{self.path} is no list of waivers, each with name, expires and why.") from error
        for waiver in found:
            _day(waiver.expires)
        return found

    def add(self, waiver: Waiver) -> None:
        """Add one; one of the same name is replaced.

        Raises:
            UserError: The date is none, or has gone by.
        """
        if expired(waiver):
            raise UserError(f"{waiver.expires} has gone by; a waiver is for days to come.")
        kept = [w for w in self.all() if w.name != waiver.name]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump([asdict(w) for w in [*kept, waiver]], sort_keys=False, allow_unicode=True)
        publish_file(self.path, text)


def fingerprint(machine: Mapping[str, Any]) -> str:
    """Digest of a machine's facts, 8 hexadecimal digits."""
    return sha256_json(dict(sorted(machine.items())))[:8]


def today() -> datetime.date:
    """Waivers end, and records are dated, by UTC."""
    return datetime.datetime.now(datetime.UTC).date()


def expired(waiver: Waiver) -> bool:
    """Whether its last day is over. Raises UserError if its date is none."""
    return _day(waiver.expires) < today()


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{text!r} is no day; it must be like 2027-01-31.") from error


def _yaml(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _LOADER)
    except (
        yaml.YAMLError,
        ValueError,
        RecursionError,
    ) as error:  # also bytes that are no text, and days that are none
        raise UserError(f"{path} is no YAML: {error}") from error
