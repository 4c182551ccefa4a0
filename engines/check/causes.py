# SPDX-License-Identifier: Apache-2.0
"""What changed between the engine that was recorded and the one that is checked, and what may come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nemo_build.engines.check.structure import form_of, structure_of
from nemo_build.engines.check.subject import Subject

_NUMBERS = ("numerics", "quality", "tasks", "acceptance", "behaviour")
_COSTS = ("size", "memory", "speed")

_BEARS_ON: Mapping[str, tuple[str, ...]] = {
    "tokenizer": ("provenance", "numerics", "quality", "tasks", "behaviour", "acceptance"),
    "template": ("provenance", "tasks"),
    "generation": ("provenance", "behaviour"),
    "spec": (*_NUMBERS, *_COSTS, "structure"),
    "options": (*_NUMBERS, *_COSTS, "structure"),
    "attributes": (*_NUMBERS, "speed", "structure"),
    "wiring": (*_NUMBERS, "memory", "speed", "structure"),
    "tensors": (*_NUMBERS, *_COSTS, "structure", "provenance"),
    "graphs": (*_NUMBERS, *_COSTS),
    "versions": (*_NUMBERS, *_COSTS),
    "config": ("provenance",),
}
"""Kinds of checks that a kind of change bears on; the kinds of changes that say most come first."""

NO_CHANGE = (
    "nothing that is recorded of the engine changed: the cause is the runtime, a library or the machine"
)
"""The likely cause where there is no other."""

_MOST = 12
"""Changes of a kind that are told one by one."""


@dataclass(frozen=True)
class Change:
    """Something that is not as it was recorded: of which kind, what, and how in words."""

    kind: str
    name: str
    text: str


@dataclass(frozen=True)
class Changes:
    """All that is not as it was recorded; ``known`` says whether anything was."""

    found: tuple[Change, ...]
    known: bool

    @classmethod
    def of(cls, subject: Subject, before: Mapping[str, Any] | None) -> Changes:
        """From the structure that was recorded; ``None`` if none was."""
        if before is None:
            return cls((), known=False)
        now = structure_of(subject)
        found: list[Change] = []
        for kind in _BEARS_ON:
            values, was = now.get(kind, {}), before.get(kind, {})
            changed = [n for n in sorted({*values, *was}) if values.get(n) != was.get(n)]
            found += [Change(kind, n, _text(kind, n, was.get(n), values.get(n))) for n in changed]
        return cls(tuple(found), known=True)

    def likely(self, kind: str, where: str = "") -> list[str]:
        """What bears on a kind of check, in words.

        Args:
            kind: The check's.
            where: Part of a name, for example of the layer that differs first: changes there come first.
        """
        bearing = [c for c in self.found if kind in _BEARS_ON[c.kind]]
        bearing.sort(key=lambda c: not (where and f"{where}." in f"{c.name}."))
        texts = [c.text for c in bearing[:_MOST]]
        if len(bearing) > _MOST:
            texts.append(f"and {len(bearing) - _MOST} more changes")
        return texts

    def to_json(self) -> list[dict[str, Any]]:
        """Plain data."""
        return [asdict(c) for c in self.found]


_WORDS: Mapping[str, str] = {
    "tokenizer": "the tokenizer changed: {name}",
    "template": "the chat template changed: {name}",
    "generation": "the generation defaults changed: {name}",
    "config": "the model's configuration changed: {name}",
    "graphs": "the graph {name} changed",
    "wiring": "nodes changed (ops, inputs or constants): {name}",
}
"""How a change of a digest is told; it says nothing itself."""


def _text(kind: str, name: str, before: Any, now: Any) -> str:
    if before is None:
        return f"{kind}: {name} is new ({now})"
    if now is None:
        return f"{kind}: {name} is gone (was {before})"
    if kind in _WORDS:
        return _WORDS[kind].format(name=name)
    if kind == "tensors":
        a, b = form_of(before), form_of(now)
        return f"the weights of {name} changed" if a == b else f"{name} was {a}, is {b}"
    return f"{kind}: {name} was {before}, is {now}"
