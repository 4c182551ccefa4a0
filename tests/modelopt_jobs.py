# SPDX-License-Identifier: Apache-2.0
"""Jobs of ModelOpt in processes of their own that need not import it: forks of one that did, and nothing else."""

from __future__ import annotations

import multiprocessing
import runpy
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_build.export.quantize import modelopt_engine

_IMPORTED = [
    "transformers.models.nemotron_h.modeling_nemotron_h",
    "modelopt.torch.quantization",
    "modelopt.torch.export",
    *(f"nemo_build.export.quantize.modelopt_{name}" for name in ("engine", "cpu", "lowrank", "smoothing")),
]

_JOB = """
import os, runpy, sys
for name, number in (("out", 1), ("err", 2)):
    os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
how, what, *arguments = [str(part) for part in command[1:]]
if how == "-m":
    sys.argv = [what, *arguments]
    runpy.run_module(what, run_name="__main__", alter_sys=True)
else:
    sys.argv = ["-c", *arguments]
    exec(compile(what, "<job>", "exec"), {"__name__": "__main__"})
"""


def run(command: Sequence[Any], *, check: bool = False, **_: Any) -> subprocess.CompletedProcess[str]:
    """As ``subprocess.run`` with ``capture_output`` and ``text``, of ``[PYTHON, "-m" or "-c", WHAT, *ARGUMENTS]``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "job.py"
        script.write_text(_JOB)
        given = {"folder": folder, "command": list(command)}
        process = context.Process(target=runpy.run_path, args=(str(script), given, "__main__"))
        process.start()
        process.join()
        out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
    done = subprocess.CompletedProcess(command, int(process.exitcode or 0), out, err)
    if check:
        done.check_returncode()
    return done


@contextmanager
def forked() -> Iterator[None]:
    """Quantization's own jobs are made like this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modelopt_engine, "subprocess", SimpleNamespace(run=run))
        yield
