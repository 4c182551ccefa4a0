# SPDX-License-Identifier: Apache-2.0
"""``nemo-build chat``: what is typed, and how answers are shown."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import rich.console
from click.testing import CliRunner, Result

from nemo_build.cli import chat, cli
from nemo_build.runtime.chat import Content, Reasoning

OPTIONS = ["--max-tokens", 40, "--seed", 1]


def run(directory: Path, lines: str, *options: object, code: int = 0) -> Result:
    arguments = ["chat", directory, *OPTIONS, *options]
    done = CliRunner().invoke(cli, [str(a) for a in arguments], input=lines)
    assert done.exit_code == code, done.output
    return done


def answers(done: Result) -> list[str]:
    """What stands behind each typed line."""
    return re.split(r"^> .*\n", done.stdout, flags=re.MULTILINE)[1:]


def test_thinking_is_switched_while_talking(demo_engine_directory: Path) -> None:
    lines = "What is a list?\n/think off\nWhat is a list?\n/think on\n/reset\nWhat is a list?\n"
    first, _, second, _, _, third = answers(run(demo_engine_directory, lines))
    assert "\n</think>\n" in first
    assert "</think>" not in second
    assert third == first  # the same seed and conversation
    assert answers(run(demo_engine_directory, "What is a list?\n", "--thinking")) == [first]


def test_a_thinking_budget(demo_engine_directory: Path) -> None:
    (long,) = answers(run(demo_engine_directory, "What is a list?\n"))
    (short,) = answers(run(demo_engine_directory, "What is a list?\n", "--thinking-budget", 3))
    reasoning, content = short.split("</think>\n")
    assert long.startswith(reasoning.rstrip("\n"))
    assert len(reasoning) < len(long.partition("</think>")[0])
    assert content.strip()
    (none,) = answers(run(demo_engine_directory, "What is a list?\n", "--thinking-budget", 0))
    assert "</think>" not in none  # as there is nothing that it could end
    plain = run(demo_engine_directory, "What is a list?\n", "--thinking-budget", 3, "--no-thinking")
    assert "</think>" not in plain.stdout


def test_effort(demo_engine_directory: Path) -> None:
    assert (
        "</think>" not in run(demo_engine_directory, "What is a list?\n", "--reasoning-effort", "none").stdout
    )
    assert "</think>" in run(demo_engine_directory, "What is a list?\n", "--reasoning-effort", "low").stdout
    both = run(demo_engine_directory, "What is a list?\n", "--reasoning-effort", "none", "--thinking")
    assert "</think>" in both.stdout
    wrong = CliRunner().invoke(cli, ["chat", str(demo_engine_directory), "--reasoning-effort", "lots"])
    assert wrong.exit_code != 0
    assert "lots" in str(wrong.exception or wrong.output)


def test_what_is_no_message(demo_engine_directory: Path) -> None:
    done = run(demo_engine_directory, "/help\n/think\n/think maybe\n/exit\nnever read\n")
    assert "/reset" in done.stdout
    assert done.stderr.count("/think takes on or off.") == 2
    assert "never read" not in done.stdout


@pytest.mark.parametrize("speculate", ["none", "mtp"])
def test_statistics(demo_engine_directory: Path, speculate: str) -> None:
    done = run(
        demo_engine_directory,
        "What is a list?\nAnd a tuple?\n",
        "--stats",
        "--speculate",
        speculate,
        "--draft-len",
        2,
    )
    counts = re.findall(
        r"^(\d+) tokens in [\d.]+ s \([\d.]+ tokens/s\), the first after [\d.]+ s$", done.stderr, re.M
    )
    assert len(counts) == 2
    assert all(1 <= int(count) <= 40 for count in counts)
    assert done.stderr.count("acceptance length") == (2 if speculate == "mtp" else 0)
    assert "tokens/s" not in done.stdout


def test_reasoning_is_dimmed_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()

    def terminal(**options: Any) -> rich.console.Console:
        return console(file=file, force_terminal=True, color_system="truecolor", width=10, **options)

    console = rich.console.Console
    monkeypatch.setattr(rich.console, "Console", terminal)
    shown = chat._Shown()
    shown.add([Reasoning("why [b]"), Reasoning(" not\n")])
    shown.add([Content("so [i]"), Content(" much longer than a line")])
    text = "\x1b[2mwhy [b]\x1b[0m\x1b[2m not\x1b[0m\n\nso [i] much longer than a line"
    assert file.getvalue().replace("\n\x1b[2m\x1b[0m", "\n") == text
    assert (shown.reasoning, shown.content) == ("why [b] not\n", "so [i] much longer than a line")
