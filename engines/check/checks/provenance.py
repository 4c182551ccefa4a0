# SPDX-License-Identifier: Apache-2.0
"""``provenance``: the engine's files are what its manifest says, and what it was made of is what was recorded.

Licences are those that the packages that nemo-build needs at run time declare, as installed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from nemo_build.bundle import sha256_file
from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.structure import KERNELS
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Figure, Status

NAME = "provenance"
MEASURED = ()
NEEDS_BASELINE = False
HARDWARE = False


@dataclass(frozen=True)
class Settings(Base):
    """What may differ from what was recorded.

    Attributes:
        same_checkpoint: Whether the engine must be of the checkpoint, and of the drafters, that were recorded.
        same_texts: Whether tokenizer, template and generation defaults must be the same to the byte.
        same_licences: Whether the licence of a package may not change, nor a package come with none.
    """

    same_checkpoint: bool = False
    same_texts: bool = True
    same_licences: bool = True


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Digests of what the engine was made of, which files are not what the manifest says, and licences."""
    manifest = subject.manifest
    damaged = [
        n for n, digest in manifest["weights"]["files"].items() if sha256_file(subject.path / n) != digest
    ]
    inputs = manifest.get("inputs", {})
    digests = {"checkpoint": inputs.get("checkpoint_digest", "unknown"), **inputs.get("drafter_digests", {})}
    return {
        "inputs": {name: str(digest)[:16] for name, digest in digests.items()},
        "texts": {n: d[:16] for n, d in sorted(manifest["files"].items()) if not n.startswith(KERNELS)},
        "licences": licences(),
        "damaged": damaged,
    }


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Nothing is a number."""
    return {}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Compare."""
    damaged = ", ".join(now["damaged"])
    status = Status.BROKEN if damaged else Status.PASS
    figures = [Figure("damaged files", status, damaged or "none", limit="none")]
    if before is not None:
        for section, strict in (
            ("inputs", settings.same_checkpoint),
            ("texts", settings.same_texts),
            ("licences", settings.same_licences),
        ):
            figures += _compared(now[section], before[section], strict)
    wrong = [f.name for f in figures if f.status is not Status.PASS]
    licences_changed = [f for f in figures if f.name in now["licences"] and f.status is not Status.PASS]
    causes = [f"the licence of {f.name} was {f.baseline}, is {f.value}" for f in licences_changed]
    return Judgement(
        f"not as it should be: {', '.join(wrong)}" if wrong else "as it should be", figures, causes
    )


def licences() -> dict[str, str]:
    """By package that nemo-build needs at run time, the licence that it declares; ``unknown`` if none."""
    found = {}
    for line in metadata.requires("nemo-build") or ():
        name = re.split(r"[\s<>=!~;\[(]", line, maxsplit=1)[0]
        if "extra ==" in line:
            continue
        try:
            about: Any = metadata.metadata(name)
        except metadata.PackageNotFoundError:
            continue
        trove = [c.split(" :: ")[-1] for c in about.get_all("Classifier") or () if c.startswith("License ::")]
        declared = about.get("License-Expression") or ", ".join(trove) or about.get("License") or "unknown"
        found[name] = declared.strip().splitlines()[0][:80]
    return found


def _compared(now: Mapping[str, str], before: Mapping[str, str], strict: bool) -> list[Figure]:
    figures = []
    for name in sorted({*now, *before}):
        value, old = now.get(name, "absent"), before.get(name, "absent")
        status = Status.REGRESS if strict and value != old else Status.PASS
        figures.append(Figure(name, status, value, old, "as recorded" if strict else "any"))
    return figures
