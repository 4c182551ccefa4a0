# SPDX-License-Identifier: Apache-2.0
"""``provenance``: the engine's files are what its manifest says, and what it was made of is what was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.bundle import sha256_file
from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

NAME = "provenance"
NEEDS_BASELINE = False


@dataclass(frozen=True)
class Settings(Base):
    """What may differ from what was recorded.

    Attributes:
        same_checkpoint: Whether the engine must be of the checkpoint that was recorded.
        same_texts: Whether tokenizer, template and generation defaults must be the same to the byte.
    """

    same_checkpoint: bool = False
    same_texts: bool = True


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Digests of what the engine was made of, and which files are not what the manifest says."""
    manifest = subject.manifest
    damaged = [
        name
        for name, digest in manifest["weights"]["files"].items()
        if sha256_file(subject.path / name) != digest
    ]
    return {
        "checkpoint": str(manifest["inputs"]["checkpoint_digest"])[:16],
        "texts": {name: digest[:16] for name, digest in sorted(manifest["files"].items())},
        "damaged": damaged,
    }


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare."""
    figures = [
        Figure(
            "damaged files",
            Status.BROKEN if now["damaged"] else Status.PASS,
            ", ".join(now["damaged"]) or "none",
            limit="none",
        )
    ]
    if before is not None:
        same = now["checkpoint"] == before["checkpoint"]
        status = Status.PASS if same or not settings.same_checkpoint else Status.REGRESS
        limit = "as recorded" if settings.same_checkpoint else "any"
        figures.append(Figure("checkpoint", status, now["checkpoint"], before["checkpoint"], limit))
        names = sorted({*now["texts"], *before["texts"]}) if settings.same_texts else []
        for name in names:
            value, old = now["texts"].get(name, "absent"), before["texts"].get(name, "absent")
            status = Status.PASS if value == old else Status.REGRESS
            figures.append(Figure(name, status, value, old, "as recorded"))
    wrong = [f.name for f in figures if f.status is not Status.PASS]
    return Judgement(f"not as it should be: {', '.join(wrong)}" if wrong else "as recorded", figures)
