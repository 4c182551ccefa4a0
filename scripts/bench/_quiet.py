# SPDX-License-Identifier: Apache-2.0
"""Measuring on a machine that others use as well: wait until it is idle, and say how busy others were."""

from __future__ import annotations

import datetime
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nemo_build.engines.machine import processor
from nemo_build.plugins import native
from nemo_build.settings import cpus

T = TypeVar("T")

IDLE = 0.93
"""Share of all CPUs that is idle before a measurement starts."""

OTHERS = 0.06
"""Share of all CPUs that other processes may have had during a measurement."""

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cpu:
    """Seconds of all CPUs since the machine was started."""

    idle: float
    total: float

    @classmethod
    def now(cls) -> Cpu:
        """Read /proc/stat."""
        numbers = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return cls((numbers[3] + numbers[4]) / _TICKS, sum(numbers) / _TICKS)


def machine() -> dict[str, Any]:
    """What figures are taken on: date, processor, cores of this process, instruction set of the CPU kernels."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": processor()[0],
        "cores": cpus(),
        "instruction_set": native.chosen(),
    }


def wait_until_idle(limit_s: float) -> None:
    """Return when the CPUs were idle for a second, or after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        before = Cpu.now()
        time.sleep(1)
        after = Cpu.now()
        if (after.idle - before.idle) / (after.total - before.total) >= IDLE:
            return


class Announcement:
    """A file that is there while something is measured, so that others who share the machine can pause.

    It is not there for long at a time: now and then it goes for a while, and measuring waits.

    Args:
        path: The file; without one nothing is announced and nothing waits.
        longest: Seconds after which the next measurement takes a break first.
        pause: Seconds of a break.
    """

    def __init__(self, path: Path | None, longest: float = 100, pause: float = 185) -> None:
        self._path = path
        self._longest, self._pause = longest, pause
        self._since: float | None = None

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """What follows is measured."""
        if self._path is None:
            return
        if self._since is not None and time.monotonic() - self._since > self._longest:
            self.end()
            time.sleep(self._pause)
        while self._since is None:
            try:
                self._path.touch(exist_ok=False)
                self._since = time.monotonic()
            except FileExistsError:  # somebody else measures
                time.sleep(2)

    def end(self) -> None:
        """Others may go on."""
        if self._path is not None and self._since is not None:
            self._path.unlink(missing_ok=True)
            self._since = None


def measure(work: Callable[[], T], *, wait_s: float = 120, tries: int = 3) -> tuple[T, float]:
    """Run `work`, whose time is spent in child processes, on an idle machine.

    Returns:
        Its result, and the share of all CPUs that others had meanwhile: of the try in which that was least.
    """
    best: tuple[T, float] | None = None
    for left in reversed(range(tries)):
        wait_until_idle(wait_s)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        before = Cpu.now()
        result = work()
        after = Cpu.now()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        own = used.ru_utime + used.ru_stime - children.ru_utime - children.ru_stime
        busy = (after.total - before.total) - (after.idle - before.idle)
        others = max(0.0, (busy - own) / (after.total - before.total))
        if best is None or others < best[1]:
            best = result, others
        if others <= OTHERS:
            break
        again = "; measuring again" if left else ""
        print(f"others had {others:.0%} of the CPUs{again}", file=sys.stderr)
    assert best is not None, "there is at least one try"
    return best
