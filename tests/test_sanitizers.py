# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels under GCC's sanitizers: accesses out of bounds, undefined behaviour, leaks and data races.

ONNX Runtime is not instrumented, so the libraries' sources are linked to a driver with a stand-in for it, in
``tests/native``; ``driver.cc`` says what it runs. Masked AVX-512 loads and stores are invisible to the sanitizers,
which is why narrower instruction sets are checked too: there they are copies of bytes.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import setuptools

from nemo_build.plugins import native

ROOT = Path(__file__).parent.parent
SETS = native.instruction_sets() or ("plain",)
FLAGS = {
    # Of a vector, what it has reserved is out of bounds too: threads keep vectors from step to step.
    "address": [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-D_GLIBCXX_SANITIZE_VECTOR",
        "-D_GLIBCXX_ASSERTIONS",
    ],
    "thread": ["-fsanitize=thread"],
}
# Sanitizer and instruction set; tasks are divided alike in all sets.
VARIANTS = [
    *(("address", kind) for kind in dict.fromkeys((SETS[-1], *SETS[:2]))),
    *(("thread", kind) for kind in dict.fromkeys((SETS[-1], SETS[:2][-1]))),
]
# Cases an op: ThreadSanitizer is several times slower.
CASES = {"address": 200, "thread": 100}
OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_init_order=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}
# What GCC's runtimes say where the kernel spreads addresses wider than they know.
UNLUCKY = ("unexpected memory mapping", "Shadow memory range interleaves")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed"),
]

Compile = Callable[[str, str], Path]


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; its output, both streams, is text."""
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


@pytest.fixture(scope="module")
def build() -> dict[str, Any]:
    """What setup.py compiles and how."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        patch.chdir(ROOT)
        return runpy.run_path("setup.py")


@pytest.fixture(scope="module")
def driver(build: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """Compiles the driver with a sanitizer, linked to the library of an instruction set."""
    folder = tmp_path_factory.mktemp("sanitizers")
    own_sources = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests/native").glob("*.cc"))

    def compile_one(source: str, name: str, flags: list[str]) -> Path:
        to = folder / name / f"{source.replace('/', '_')}.o"
        if not to.exists():
            to.parent.mkdir(exist_ok=True)
            done = run("g++", *flags, "-Iplugins/native", "-c", source, "-o", to)
            assert done.returncode == 0, done.stdout
        return to

    def compile_all(sanitizer: str, instruction_set: str) -> Path:
        kernels = next(k for k in build["KERNELS"] if k.name.endswith(f"._{instruction_set}"))
        flags = [*kernels.extra_compile_args, "-O1", "-g1", "-fno-omit-frame-pointer", *FLAGS[sanitizer]]
        own_flags = [*build["COMMON"], "-O1", "-g1", "-Wall", "-Wextra", "-Werror", *FLAGS[sanitizer]]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            jobs = [
                pool.submit(compile_one, s, f"{sanitizer}_{instruction_set}", flags) for s in kernels.sources
            ]
            jobs += [pool.submit(compile_one, s, sanitizer, own_flags) for s in own_sources]
        program = folder / f"driver_{sanitizer}_{instruction_set}"
        done = run("g++", *FLAGS[sanitizer], "-pthread", *(job.result() for job in jobs), "-o", program)
        assert done.returncode == 0, done.stdout
        return program

    return compile_all


@pytest.mark.parametrize(("sanitizer", "kind"), VARIANTS)
def test_no_report(driver: Compile, sanitizer: str, kind: str) -> None:
    program = driver(sanitizer, kind)
    command = [str(program), str(CASES[sanitizer])]
    done = run(*command, env={**os.environ, **OPTIONS})
    if any(text in done.stdout for text in UNLUCKY):
        done = run("setarch", platform.machine(), "-R", *command, env={**os.environ, **OPTIONS})
    assert done.returncode == 0, done.stdout[-20_000:]
