# SPDX-License-Identifier: Apache-2.0
"""The parts of an answer, in pieces as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Content", "Delta", "Reasoning", "ToolCallArguments", "ToolCallStart", "joined"]


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins: the only delta that has its id and its name.

    Attributes:
        index: Which of the answer's calls, from 0.
        id: Unique among all calls.
        name: The function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments; all pieces of a call joined are a JSON object."""

    index: int
    text: str


Delta = Reasoning | Content | ToolCallStart | ToolCallArguments


def joined(deltas: Sequence[Delta]) -> list[Delta]:
    """The same with those in one that go on with each other."""
    found = list(deltas[:1])
    for delta in deltas[1:]:
        last = found[-1]
        if isinstance(delta, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + delta.text)
        elif (
            isinstance(delta, ToolCallArguments)
            and isinstance(last, ToolCallArguments)
            and delta.index == last.index
        ):
            found[-1] = ToolCallArguments(last.index, last.text + delta.text)
        else:
            found.append(delta)
    return found
