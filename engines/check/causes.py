# SPDX-License-Identifier: Apache-2.0
"""What changed between the engine that was recorded and the one that is checked, and what may come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.engines.check.baseline import Baseline
from nemo_build.engines.check.structure import structure_of
from nemo_build.engines.check.subject import Subject

_BEARS_ON: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("provenance", "quality", "behaviour", "acceptance"),
    "template": ("provenance", "quality"),
    "generation": ("provenance", "behaviour"),
    "tensors": ("numerics", "quality", "acceptance", "size", "speed", "structure", "provenance"),
    "graphs": ("numerics", "quality", "behaviour", "acceptance", "speed", "structure", "provenance"),
    "options": ("numerics", "quality", "acceptance", "size", "speed", "structure", "provenance"),
    "versions": ("numerics", "speed", "size", "provenance"),
}
"""Kinds of checks that a kind of change bears on."""


@dataclass(frozen=True)
class Change:
    """Something that is not as it was recorded: of which kind, and what in words."""

    kind: str
    text: str


@dataclass(frozen=True)
class Changes:
    """All that is not as it was recorded; nothing, if nothing was recorded."""

    found: tuple[Change, ...]

    @classmethod
    def of(cls, subject: Subject, baseline: Baseline) -> Changes:
        """From the structure that was recorded with the baseline."""
        before = baseline.recorded("structure", hardware=False)
        if before is None:
            return cls(())
        now = structure_of(subject)
        found: list[Change] = []
        for section, values in now.items():
            was = before.get(section, {})
            names = sorted({*values, *was})
            changed = [n for n in names if values.get(n) != was.get(n)]
            found += [Change(section, _text(section, n, was.get(n), values.get(n))) for n in changed[:20]]
            if len(changed) > 20:
                found.append(Change(section, f"{section}: and {len(changed) - 20} more"))
        return cls(tuple(found))

    def likely(self, kind: str) -> list[str]:
        """What bears on a kind of check, in words."""
        return [c.text for c in self.found if kind in _BEARS_ON.get(c.kind, ())]

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data."""
        return [{"kind": c.kind, "text": c.text} for c in self.found]


def _text(section: str, name: str, before: Any, now: Any) -> str:
    if before is None:
        return f"{section}: {name} is new ({now})"
    if now is None:
        return f"{section}: {name} is gone (was {before})"
    return f"{section}: {name} was {before}, is {now}"
