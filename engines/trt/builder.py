# SPDX-License-Identifier: Apache-2.0
"""Building of plans, each in a process of its own.

The library may abort or crash, which nothing in the process can catch; and a process that has built one plan orders the
next one otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from nemo_build.bundle import Progress
from nemo_build.engines.trt import Library
from nemo_build.engines.trt.phases import Phase
from nemo_build.errors import UserError


@dataclass(frozen=True)
class Job:
    """One plan to build.

    Attributes:
        library: What builds it.
        model: The lowered graph; its weights lie beside it.
        out: The plan's file.
        log: Where the library's messages go; the file stays if the build fails.
        sms: GPUs, compute capability times ten.
        profile: Smallest, usual and largest shape of each input that varies.
        network: What makes the network and builds it, ``module:class`` of a :class:`~.network.Network`.
        options: Further arguments of that class, as JSON has them.
        environment: Variables that the process gets besides this one's.
    """

    library: Library
    model: Path
    out: Path
    log: Path
    sms: tuple[int, ...]
    profile: Mapping[str, Sequence[Sequence[int]]]
    network: str = f"{__package__}.network:Network"
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def told(self, out: int) -> dict[str, Any]:
        """What the process is told: nothing that depends on where files are. `out` is an open file."""
        profile = {name: [list(shape) for shape in shapes] for name, shapes in self.profile.items()}
        return {
            "module": self.library.module,
            "title": self.library.title,
            "model": self.model.name,
            "out": out,
            "sms": list(self.sms),
            "profile": profile,
            "network": self.network,
            "options": dict(self.options),
        }


@dataclass(frozen=True)
class Built:
    """What a build took, and what came of it.

    Attributes:
        peak: Peak memory of its process in bytes, memory-mapped weights included.
        facts: What the library says of the plan, where it can read it on this machine.
    """

    peak: int
    facts: Mapping[str, Any]


def profile_of(model_inputs: Mapping[str, Sequence[int | str]], phase: Phase) -> dict[str, list[list[int]]]:
    """The profile of a phase for inputs by name and shape; dimensions are ``batch``, ``steps`` and ``rows``.

    The usual shape decides more than speed. Where it has a single token, the compiler finds it cheaper to write the
    decoded rows of all chosen experts to memory than to decode them as they are multiplied, and the scratch memory of
    that is for the largest shape: gigabytes.
    """
    largest = {"batch": phase.slots, "steps": phase.steps, "rows": phase.logit_rows}
    usual = {"batch": 1, "steps": phase.steps, "rows": 1}
    smallest = dict.fromkeys(largest, 1)
    return {
        name: [[d if isinstance(d, int) else sizes[d] for d in shape] for sizes in (smallest, usual, largest)]
        for name, shape in model_inputs.items()
        if any(isinstance(d, str) for d in shape)
    }


def build_plan(job: Job, progress: Progress | None = None) -> Built:
    """Build one plan; a file of its name appears when it is whole.

    Args:
        job: What to build.
        progress: Told of each number of bytes written.

    Raises:
        UserError: The compiler refuses the graph, or its process ends by a signal. The log stays.
    """
    partial = job.out.with_suffix(".partial")
    with open(partial, "w+b") as out, open(job.log, "ab") as log:
        process = _start(job, out.fileno(), log)
        told = job.told(out.fileno())
    try:
        last = _follow(process, told, progress)
        _require_success(job, last, process.wait())
        os.replace(partial, job.out)
    except BaseException:  # also Ctrl-C
        process.kill()
        process.wait()
        partial.unlink(missing_ok=True)
        raise
    finally:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
    job.log.unlink()
    return Built(int(last["peak"]), last["facts"])


def _start(job: Job, out: int, log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start the process in the model's folder; its messages, and what the library prints as it crashes, are the log.

    Where the library has a choice of order it follows addresses. So that they are the same each time, the process is
    told no path, has none in its search path (-P), and Python's hashes have a fixed seed; the rest it does itself.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"{__package__}.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        cwd=job.model.parent,
        pass_fds=[out],
        env={**os.environ, "PYTHONHASHSEED": "0", **job.environment},
    )


def _follow(process: subprocess.Popen[bytes], told: object, progress: Progress | None) -> dict[str, Any]:
    """Give a process its job and follow its events; returns the last one."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it ended before it read; how is told by its exit
        process.stdin.write(json.dumps(told).encode())
        process.stdin.close()
    last: dict[str, Any] = {"event": "nothing"}
    for line in process.stdout:
        last = json.loads(line)
        if last["event"] == "bytes" and progress:
            progress(last["count"])
    return last


def _require_success(job: Job, last: Mapping[str, Any], code: int) -> None:
    hint = f"The compiler's messages are in {job.log}."
    if code < 0:
        how = f"signal {-code}"
        if code == -9:
            how += ", as when memory runs out"
            hint = f"It takes up to 2.2 times a plan's weights; --phases decode needs less. {hint}"
        raise UserError(
            f"{job.library.title} ended its process while it built {job.out.stem}: {how}.", hint=hint
        )
    if last["event"] == "refused":
        raise UserError(last["headline"], [p[:500] for p in last["problems"]], _hint(last["problems"], hint))
    if code or last["event"] != "done":
        raise UserError(f"The build of {job.out.stem} failed (exit code {code}).", hint=hint)


def _hint(problems: Sequence[str], otherwise: str) -> str:
    """How to mend what the compiler refuses."""
    if any("HW-specific datatypes" in p for p in problems):
        return f"Build for GPUs that have these types, or convert the weights (--weights int4). {otherwise}"
    return otherwise
