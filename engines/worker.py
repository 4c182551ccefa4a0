# SPDX-License-Identifier: Apache-2.0
"""One build in a process of its own: ``python -m nemo_build.engines.worker``.

The job comes as JSON on standard input; events go as one JSON object a line to what was standard output when the
process began. Whatever libraries print, there too, goes to standard error. A compiler that crashes takes down this
process and nothing else.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.errors import UserError

_INTERVAL = 0.2  # seconds between two events that say how far a phase is


@dataclass(frozen=True)
class BuildJob:
    """A build to be done somewhere.

    Attributes:
        name: What it is called in messages.
        bundle: Directory of the model bundle, where the build runs.
        out: Directory of the engine, where the build runs.
        target: A name of :data:`~nemo_build.engines.targets.TARGETS`.
        options: What the engine is asked for.
        use_cache: As of :func:`~nemo_build.engines.build.build_engine`.
        force: Likewise.
    """

    name: str
    bundle: str
    out: str
    target: str
    options: BuildOptions
    use_cache: bool = True
    force: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain data, the inverse of :meth:`from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> BuildJob:
        """The inverse of :meth:`to_json`."""
        return cls(**{**data, "options": BuildOptions(**data["options"])})


class _Events:
    """Writes events, and is a :class:`~nemo_build.engines.build.BuildProgress` that makes them."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def send(self, event: str, **data: object) -> None:
        self._stream.write(json.dumps({"event": event, **data}) + "\n")
        self._stream.flush()

    def start(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a phase of `total` bytes."""
        self.send("phase", what=what, total=total)
        done, told = 0, time.monotonic()

        def advance(more: int) -> None:
            nonlocal done, told
            done += more
            if done >= total or time.monotonic() - told > _INTERVAL:
                told = time.monotonic()
                self.send("done", bytes=done)

        return advance


def work(job: BuildJob, events: _Events) -> int:
    """Do a job; returns the exit status. Its last event is ``result`` or ``error``."""
    try:
        result = build_engine(
            Path(job.bundle),
            Path(job.out),
            job.target,
            job.options,
            use_cache=job.use_cache,
            force=job.force,
            progress=events,
        )
    except UserError as error:
        events.send("error", headline=error.headline, problems=error.problems, hint=error.hint)
        return 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        events.send("error", headline=f"{where}{error.strerror or error}", problems=[], hint="")
        return 1
    events.send("result", key=result.key, cached=result.cached, plan=result.plan.to_json())
    return 0


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    job = BuildJob.from_json(json.load(sys.stdin))
    try:
        status = work(job, _Events(stream))
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    main()
