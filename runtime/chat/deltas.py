# SPDX-License-Identifier: Apache-2.0
"""The parts of an answer, in pieces as they come."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Content", "Delta", "Reasoning", "ToolCallArguments", "ToolCallStart"]


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
