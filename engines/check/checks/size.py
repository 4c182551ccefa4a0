# SPDX-License-Identifier: Apache-2.0
"""``size``: bytes of the engine, by format of weights, and what its plan needs in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.statistics import growth_figures
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Status

NAME = "size"
MEASURED = ()
NEEDS_BASELINE = True
HARDWARE = False


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
    for tensor in manifest["weights"].get("tensors", {}).values():
        formats[f"weights in {tensor.get('format', tensor['dtype'])}"] += tensor["nbytes"]
    files = {
        str(p.relative_to(subject.path)): p.stat().st_size for p in subject.path.rglob("*") if p.is_file()
    }
    plan = {
        f"planned {name}": value
        for name, value in manifest["plan"].items()
        if isinstance(value, int) and name not in ("slots", "context")
    }
    sizes = {f"file {name}": size for name, size in sorted(files.items())}
    return {"bytes": sum(files.values()), **sizes, **dict(sorted(formats.items())), **plan}


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Bytes on disk."""
    return {"bytes": found["bytes"]}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Growth beyond the limit regresses; a format that was not there before does too."""
    figures = growth_figures(now, before or now, settings.grow, settings.slack_bytes)
    grown = [f.name for f in figures if f.status is Status.REGRESS]
    details = {"now": dict(now), "before": dict(before or now)}
    causes = [f"{name} grew" for name in grown if name.startswith(("file ", "weights in "))]
    return Judgement(f"{', '.join(grown)} grew" if grown else "nothing grew", figures, causes, details)
