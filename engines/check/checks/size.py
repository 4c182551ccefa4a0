# SPDX-License-Identifier: Apache-2.0
"""``size``: bytes of the engine, by file and by format of weights, and what its plan needs in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

NAME = "size"
NEEDS_BASELINE = True


@dataclass(frozen=True)
class Settings(Base):
    """How much more an engine may take.

    Attributes:
        grow: Largest growth of any figure, as a fraction of what was recorded.
        slack_bytes: Growth that never matters.
    """

    grow: float = 0.02
    slack_bytes: int = 65536


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Bytes on disk, by format, and planned."""
    manifest = subject.manifest
    formats: Counter[str] = Counter()
    for tensor in manifest["weights"]["tensors"].values():
        formats[f"weights in {tensor.get('format', tensor['dtype'])}"] += tensor["nbytes"]
    files = {p: p.stat().st_size for p in subject.path.rglob("*") if p.is_file()}
    plan = manifest["plan"]
    return {
        "bytes": sum(files.values()),
        **dict(sorted(formats.items())),
        **{f"planned {n}": plan[n] for n in ("weights_memory", "state", "cache", "activations", "total")},
    }


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Growth beyond the limit regresses; a format that was not there before does too."""
    was = before or now
    figures = []
    for name in sorted({*now, *was}):
        value, old = now.get(name, 0), was.get(name, 0)
        limit = max(old * (1 + settings.grow), old + settings.slack_bytes)
        change = f"{value / old - 1:+.1%}" if old else "new" if value else ""
        status = Status.REGRESS if value > limit else Status.PASS
        figures.append(Figure(name, status, value, old, f"at most {limit:.0f}", change))
    grown = [f.name for f in figures if f.status is Status.REGRESS]
    return Judgement(f"{', '.join(grown)} grew" if grown else "nothing grew", figures)
