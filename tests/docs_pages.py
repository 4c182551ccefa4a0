# SPDX-License-Identifier: Apache-2.0
"""README.md and docs/*.md as data: fenced blocks, commands, links, anchors."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import click

from nemo_build.cli import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
FENCE = re.compile(r"^ *```")
USAGE = re.compile(r"\[|…|\||<[A-Z]")
"""What makes a line a description of a verb's options rather than a command: brackets, dots, alternatives."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: The page's path in the repository.
        line: Where its text begins, from 1.
        language: What is written behind the fence; ``sh`` if nothing is.
        text: What is in it.
        not_run: Why no test runs it; ``None`` if one does.
    """

    page: str
    line: int
    language: str
    text: str
    not_run: str | None

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page}:{self.line}"

    @property
    def is_usage(self) -> bool:
        """Whether it describes options (``[--json]``, ``N,N,…``, ``--text TEXT | --tokens N``) and has no commands."""
        return self.language == "sh" and any(is_usage(line) for line in self.text.splitlines())

    def commands(self) -> Iterator[str]:
        """Its commands, one a line; lines that go on are joined. Of ``console``, the lines behind a ``$``."""
        joined = self.text.replace("\\\n", " ")
        if self.is_usage:
            joined = joined.replace("\n ", " ")
        for line in joined.splitlines():
            if self.language == "console":
                if line.startswith("$ "):
                    yield line[2:]
            elif line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


@cache
def blocks() -> tuple[Block, ...]:
    """All fenced blocks of all pages."""
    return tuple(block for page in PAGES for block in _blocks_of(page))


def _blocks_of(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for i, line in enumerate(lines):
        if not FENCE.match(line):
            continue
        if start is None:
            start = i
            continue
        before = "\n".join(lines[max(start - 2, 0) : start])
        reason = NOT_RUN.search(before)
        language = lines[start].strip().removeprefix("```").strip() or "sh"
        text = "\n".join(lines[start + 1 : i])
        yield Block(name_of(page), start + 2, language, text, reason[1] if reason else None)
        start = None
    assert start is None, f"{name_of(page)}: the fence in line {start} is not closed"


def prose(page: Path) -> str:
    """A page's text without its fenced blocks."""
    inside, kept = False, []
    for line in page.read_text(encoding="utf-8").splitlines():
        if FENCE.match(line):
            inside = not inside
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def words(command: str) -> list[str]:
    """A command's words, without its comment; operators of the shell are words of their own."""
    lexer = shlex.shlex(command, posix=True, punctuation_chars="&|;<>")
    lexer.whitespace_split = True
    return list(lexer)


def is_usage(command: str) -> bool:
    """Whether a line describes options and is no command."""
    return bool(USAGE.search(re.sub(r"'[^']*'|\"[^\"]*\"|#.*| \|\| | \| (?!--)", "", command)))


def option_problems(command: str, place: str) -> list[str]:
    """What a line says of nemo-build's verbs and options that is not so."""
    plain = re.sub(r"[\[\]|]", " ", command.split(" #")[0]) if is_usage(command) else command
    found: list[str] = []
    verb: click.Command | None = None
    verb_name, is_verb_next = "", False
    for word in words(plain):
        if word == "nemo-build":
            is_verb_next, verb = True, None
        elif set(word) <= set("&|;<>"):
            is_verb_next, verb = False, None
        elif is_verb_next:
            verb, verb_name, is_verb_next = _verb(word), word, False
            if verb is None and not word.startswith("-") and word not in ("VERB", "…"):
                found.append(f"{place}: there is no verb {word}")
        elif verb is not None and re.match(r"--?[a-z]", word):
            option = word.split("=")[0].rstrip(",.")
            if option not in _options(verb):
                found.append(f"{place}: {verb_name} has no option {option}")
    return found


def _verb(name: str) -> click.Command | None:
    assert isinstance(cli, click.Group)
    return cli.get_command(click.Context(cli), name)


def _options(verb: click.Command) -> set[str]:
    declared = {o for p in verb.params for o in (*p.opts, *p.secondary_opts)}
    return declared | {"-h", "--help"}


LINK = re.compile(r"(?<!`)!?\[[^\]]*\]\(([^)\s]+)\)")
ANCHOR = re.compile(r"[^\w\- ]")


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures."""
    return LINK.findall(re.sub(r"`[^`\n]*`", "", prose(page))) + re.findall(
        r'<(?:img|source)[^>]* src(?:set)?="([^"]+)"', prose(page)
    )


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    seen: dict[str, int] = {}
    found = set()
    for title in re.findall(r"^#+ +(.+?) *#*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
        anchor = ANCHOR.sub("", text.lower()).replace(" ", "-")
        count = seen[anchor] = seen.get(anchor, -1) + 1
        found.add(f"{anchor}-{count}" if count else anchor)
    return found
