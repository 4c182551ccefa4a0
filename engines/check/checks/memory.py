# SPDX-License-Identifier: Apache-2.0
"""``memory``: what a process that opens the engine and generates takes at its peak, beyond one that does nothing.

Measured in a process of its own: the high-water mark of resident memory (``VmHWM``) that Linux keeps, after all modules
are imported and again at the end.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_build.engines.check.checks import Judgement, Skip
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.statistics import growth_figures
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.verdict import Status
from nemo_build.errors import BundleError

NAME = "memory"
MEASURED = ("tokens", "output", "sequences")
NEEDS_BASELINE = True
HARDWARE = True

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True)
class Settings(Base):
    """What the process generates, and how much more it may take.

    Attributes:
        sequences: Sequences at a time.
        tokens: Tokens of each prompt.
        output: Tokens after each.
        grow: Largest growth of the peak, as a fraction of what was recorded.
        slack_bytes: Growth that never matters; allocators and page sizes move peaks by ten MB or more.
    """

    sequences: int = 2
    tokens: int = 256
    output: int = 16
    grow: float = 0.05
    slack_bytes: int = 32 << 20


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Bytes of resident memory."""
    if not _STATUS.is_file():
        raise Skip("only Linux tells the peak of a process's memory")
    subject.engine()  # raises Skip if it cannot run here
    options = subject.manifest["options"]
    if options["max_context"] <= settings.output:
        raise Skip(f"the engine's context has no room for {settings.output} tokens after a prompt")
    arguments = {
        "engine": str(subject.path),
        "speculate": subject.speculator,
        "sequences": min(settings.sequences, options["max_sequences"]),
        "tokens": settings.tokens,
        "output": settings.output,
    }
    command = [sys.executable, "-m", __name__, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise BundleError(f"the process that opens the engine failed: {last}")
    return {"peak bytes": int(done.stdout.split()[-1])}


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """The peak."""
    return {"peak bytes": found["peak bytes"]}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Growth beyond the limit regresses."""
    figures = growth_figures(now, before or now, settings.grow, settings.slack_bytes)
    grew = any(f.status is Status.REGRESS for f in figures)
    return Judgement("the peak of memory grew" if grew else "it takes no more memory", figures)


def _peak() -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _main(arguments: Mapping[str, Any]) -> None:
    """Open an engine, generate, and print by how much the peak rose."""
    from nemo_build.engines.check.prompts import filled
    from nemo_build.runtime.engine import Engine
    from nemo_build.runtime.params import SamplingParams

    start = _peak()
    engine = Engine.load(
        arguments["engine"], speculate=arguments["speculate"], max_sequences=arguments["sequences"]
    )
    length = min(arguments["tokens"], engine.session.context - arguments["output"])
    prompts = filled(engine, arguments["sequences"], length)
    params = SamplingParams(max_tokens=arguments["output"], temperature=0, ignore_eos=True)
    engine.generate(prompts, params)
    print(_peak() - start)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
