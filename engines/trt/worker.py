# SPDX-License-Identifier: Apache-2.0
"""The process that one plan is built in: ``python -m nemo_build.engines.trt.worker``.

Its standard input is a job as JSON; its standard output is one JSON object a line, each with an ``event``: ``phase``,
``bytes``, ``refused`` (headline, problems), ``done`` (peak memory in bytes, facts about the plan). Messages, and
whatever the library itself prints, go to standard error.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from nemo_build.engines.trt.network import Network, Report
from nemo_build.errors import UserError

_ADDR_NO_RANDOMIZE = 0x0040000  # of personality(2)
_ASK = 0xFFFFFFFF


def fix_addresses() -> None:
    """Start this process again with addresses that are the same each time, where the system allows that.

    The order of some entries of a plan follows addresses.
    """
    libc = ctypes.CDLL(None)
    if libc.personality(_ASK) & _ADDR_NO_RANDOMIZE:
        return
    libc.personality(libc.personality(_ASK) | _ADDR_NO_RANDOMIZE)
    if libc.personality(_ASK) & _ADDR_NO_RANDOMIZE:
        os.execv(sys.executable, sys.orig_argv)


def main() -> None:
    """Build the plan of the job, in a thread of its own.

    Allocators give a thread memory of its own, so that addresses there do not hang on what the process was given and
    did before: its environment, its paths, its modules.
    """
    with suppress(OSError):  # where memory runs out, this process is to end and no other
        Path("/proc/self/oom_score_adj").write_text("1000")
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def report(event: str, **what: object) -> None:
        print(json.dumps({"event": event, **what}), file=events, flush=True)

    job = json.load(sys.stdin)
    with suppress(ImportError, OSError):  # told by the network, which imports it again
        importlib.import_module(job["module"])
    module, _, name = job["network"].partition(":")
    make: type[Network] = getattr(importlib.import_module(module), name)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(build, make, job, report).result()


def build(make: type[Network], job: dict[str, Any], report: Report) -> None:
    """Build the plan of the job, and tell how that ends."""
    try:
        network = make(job["module"], job["title"], job["model"], sys.stderr, **job["options"])
        facts = network.build(job["out"], job["sms"], job["profile"], report)
    except UserError as error:
        report("refused", headline=error.headline, problems=list(error.problems))
        return
    report("done", peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, facts=facts)


if __name__ == "__main__":
    fix_addresses()
    main()
