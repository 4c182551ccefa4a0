# SPDX-License-Identifier: Apache-2.0
"""Every command and every piece of Python in README.md and docs/*.md runs, or the page says why not.

Pages run in order, each in a directory of its own that has what the tables of docs/README.md name. A block that is
not run has ``<!-- not run: reason -->`` before it; its verbs, options and extras are looked up all the same.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from nemo_build.cli import cli

from .docs_pages import PAGES, ROOT, Block, blocks, is_usage, name_of, option_problems, prose, words

INDEX = ROOT / "docs" / "README.md"
ELSEWHERE = {"docs/extending.md": "tests/test_docs_extending.py"}
"""Pages whose code goes into files of a copy; what runs them."""

NEEDS_SHELL = re.compile(r"[&|;<>$`](?=([^']*'[^']*')*[^']*$)")
"""What a shell acts upon, outside of single quotes."""

EXPECTED = {"diff": (0, 1), "bisect": (0, 1), "check": (0, 3)}
"""Exit statuses that are no failure, by verb; 0 for all others."""

SLOW = re.compile(r"nemo-build bench engine|-o \S+ --target rtx-")
"""Commands that take more than a few seconds."""

RUNS = [
    b
    for b in blocks()
    if b.page not in ELSEWHERE
    and b.not_run is None
    and b.language in ("sh", "console", "python")
    and not b.is_usage
]


def table(heading: str) -> dict[str, str]:
    """The rows of a table of docs/README.md: several words in its first column have the same second one."""
    part = INDEX.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| `(.+?)` \|", part, re.MULTILINE)
    return {word: value for first, value in rows for word in re.findall(r"`([^`]+)`", first)}


PLACES, SHORTER = table("What stands for what"), table("What is added")


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Path:
    """What pages start from: a bundle of the demo checkpoint with its drafters, and two engines of it."""
    from nemo_build.demo import CHECKPOINT, DRAFTERS
    from nemo_build.engines.build import BuildOptions, build_engine
    from nemo_build.export.exporter import export_bundle

    directory = tmp_path_factory.mktemp("docs")
    export_bundle(CHECKPOINT, directory / "bundle", drafts=list(DRAFTERS.values()))
    for name, weights in (("engine", "auto"), ("other", "int8")):
        options = BuildOptions(max_sequences=8, weights=weights)
        build_engine(directory / "bundle", directory / name, options=options)
    return directory


@dataclass
class Reader:
    """Somebody who does what a page says.

    Attributes:
        folder: Where.
        slow: Whether slow commands are run too.
        namespace: What the page's Python has defined.
        servers: Processes that a page started and that go on.
    """

    folder: Path
    shared: Path
    slow: bool
    namespace: dict[str, Any] = field(default_factory=dict)
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = 0

    def read(self, page: str) -> None:
        """Do all of a page."""
        for name in ("bundle", "engine", "other"):
            (self.folder / name).symlink_to(self.shared / name)
        try:
            for block in (b for b in RUNS if b.page == page):
                if block.language == "python":
                    self.execute(block)
                else:
                    for command in block.commands():
                        if self.slow or not SLOW.search(command):
                            self.type(command, block.place)
        finally:
            self.stop_servers()

    def type(self, command: str, place: str) -> None:
        """Do what a command line says, and look at how it ends."""
        arguments = [self.place(w) for w in words(command)]
        for known, more in SHORTER.items():
            if arguments[: len(known.split())] == known.split():
                arguments += shlex.split(more)
        verb = arguments[1] if arguments[0] == "nemo-build" and len(arguments) > 1 else ""
        if verb == "serve":
            self.serve(arguments, place)
            return
        self.make_room(arguments)
        line = re.sub(r"\s#\s.*", "", command)
        if arguments[0] == "nemo-build" and not NEEDS_SHELL.search(line):
            done = CliRunner().invoke(cli, arguments[1:], input="Hello\n/exit\n")
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                raise AssertionError(f"{place}: {command}") from done.exception
            status, said = done.exit_code, done.output
        else:
            status, said = run_in_shell(self.place(line), self.folder)
        assert status in EXPECTED.get(verb, (0,)), f"{place}: {command}\nstatus {status}\n{said}"

    def place(self, word: str) -> str:
        """A word with what stands in its place here."""
        for known, path in PLACES.items():
            full = str(ROOT / path) if (ROOT / path).exists() else path
            word = re.sub(rf"(?<![\w/.-]){re.escape(known)}(?![\w-])", lambda _, full=full: full, word)
        return re.sub(r"\b(localhost|127\.0\.0\.1):8000\b", rf"\1:{self.port}", word) if self.port else word

    def make_room(self, arguments: list[str]) -> None:
        """What is the page's own output is not there before."""
        for option, name in itertools.pairwise(arguments):
            path = self.folder / name
            if option in ("-o", "--out") and path.is_symlink():
                path.unlink()

    def execute(self, block: Block) -> None:
        """Run Python; ``await`` and the like may stand outside of a coroutine."""
        text = "\n" * (block.line - 1) + self.place(block.text)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(text, block.page, "exec", flags=flags, dont_inherit=True)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(eval(code, self.namespace))
        else:
            exec(code, self.namespace)

    def serve(self, arguments: list[str], place: str) -> None:
        """Start a server, on a port that is free, and wait until it answers."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        log = self.folder / f"server-{self.port}.log"
        with log.open("w") as out:
            command = [*MAIN, *(a for a in arguments[1:] if a != "&"), "--port", str(self.port)]
            process = subprocess.Popen(command, cwd=self.folder, stdout=out, stderr=subprocess.STDOUT)
        self.servers.append(process)
        end = time.monotonic() + 60
        while time.monotonic() < end and process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=30):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        raise AssertionError(f"{place}: no server\n{log.read_text()}")

    def stop_servers(self) -> None:
        """End what was started, as a user would."""
        for process in self.servers:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


MAIN = [sys.executable, "-c", "from nemo_build.cli import main; main()"]


def run_in_shell(line: str, folder: Path) -> tuple[int, str]:
    """Exit status and output of a line in bash, with ``nemo-build`` and ``python`` those of this environment."""
    tools = folder / ".tools"
    if not tools.is_dir():
        tools.mkdir()
        for name, program in (("nemo-build", MAIN), ("python", [sys.executable])):
            (tools / name).write_text(f'#!/bin/sh\nexec {shlex.join(program)} "$@"\n')
            (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environment,
        input="Hello\n",
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def pages(slow: bool) -> list[str]:
    """Pages with something that is slow; or with something that is not, such as all of the Python."""
    found = {}
    for block in RUNS:
        lines = ["python"] if block.language == "python" else block.commands()
        if any(bool(SLOW.search(line)) == slow for line in lines):
            found[block.page] = True
    return list(found)


def read(page: str, shared: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    monkeypatch.chdir(folder)
    Reader(folder, shared, slow).read(page)


@pytest.mark.parametrize("page", pages(slow=False))
def test_commands_run(page, shared, tmp_path, monkeypatch):
    read(page, shared, tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages(slow=True))
def test_slow_commands_run(page, shared, tmp_path, monkeypatch):
    """The whole page again, in order, with what takes long."""
    read(page, shared, tmp_path, monkeypatch, slow=True)


def commands() -> Iterator[tuple[str, Block]]:
    """Every command line of every page."""
    for block in blocks():
        if block.language in ("sh", "console"):
            for line in block.commands():
                yield line, block


def test_every_verb_and_option_exists():
    """In blocks that are run and in those that are not, and in commands within sentences."""
    problems = [
        p
        for line, block in commands()
        if block.page not in ELSEWHERE
        for p in option_problems(line, block.place)
    ]
    for page in PAGES:
        for line in re.findall(r"`(nemo-build [^`]+)`", prose(page)):
            problems += option_problems(line, name_of(page))
    assert not problems


def test_values_of_commands_that_are_not_run_are_understood():
    """The command line's parser takes them."""
    problems = []
    for line, block in commands():
        arguments = words(line)
        if block.not_run is None or block.is_usage or arguments[0] != "nemo-build":
            continue
        first = arguments.index("&&") if "&&" in arguments else len(arguments)
        assert isinstance(cli, click.Group)
        verb = cli.get_command(click.Context(cli), arguments[1])
        assert verb is not None
        try:
            verb.make_context(arguments[1], [*arguments[2:first]])
        except click.ClickException as error:
            problems.append(f"{block.place}: {line}: {error.format_message()}")
    assert not problems


def test_what_is_not_run_says_why():
    """Every block of commands or Python is run, only describes options, or has a reason; pages list their reasons."""
    silent = []
    for block in blocks():
        if block.language not in ("sh", "console", "python") or block in RUNS or block.is_usage:
            continue
        if block.page in ELSEWHERE:
            continue
        if len(block.not_run or "") < 10:
            silent.append(block.place)
        print(f"{block.place}: not run: {block.not_run}")
    assert not silent
    assert {b.language for b in blocks()} <= {"sh", "console", "python", "cpp", "yaml", "json", "text"}


def test_programs_and_extras_that_are_named_exist():
    """Scripts are in the repository, and extras in pyproject.toml, whether a block is run or not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    problems = []
    for line, block in commands():
        for extras in re.findall(r"nemo-build\[([\w,-]+)\]", line):
            problems += [
                f"{block.place}: there is no extra {e}"
                for e in extras.split(",")
                if e not in project["optional-dependencies"]
            ]
        for path in re.findall(r"(?:^|\s)((?:scripts|deploy)/[\w/.-]+)", line):
            if not (ROOT / path).exists():
                problems.append(f"{block.place}: there is no {path}")
    for page in PAGES:
        for path in re.findall(r"`((?:scripts|deploy|tests)/[\w/.]+\w)`", prose(page)):
            if not (ROOT / path).exists():
                problems.append(f"{name_of(page)}: there is no {path}")
        for extra in re.findall(r"nemo-build\[(\w[\w-]*)\]", prose(page)):
            if extra not in project["optional-dependencies"]:
                problems.append(f"{name_of(page)}: there is no extra {extra}")
    assert not problems


def test_a_mistake_would_be_found():
    """The checks themselves can fail."""
    assert option_problems("nemo-build build bundle --nonsense", "here") == [
        "here: build has no option --nonsense"
    ]
    assert option_problems("nemo-build bake bundle", "here") == ["here: there is no verb bake"]
    assert is_usage("nemo-build bench ENGINE [--json FILE]")
    assert not is_usage("nemo-build triton -o repository --run   # a server […]")
