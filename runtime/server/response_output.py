# SPDX-License-Identifier: Apache-2.0
"""The items of a response, whole and as events while they come."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nemo_build.runtime.chat import Content, Delta, Reasoning, ToolCallStart

__all__ = ["Event", "Items"]

Event = tuple[str, dict[str, Any]]
"""Its type, and its members but for type and number."""


class Items:
    """The items of a response so far, of which the last may be open.

    Attributes:
        output: The items as OpenAI writes them; an open one has no text yet.
    """

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._is_open = False
        self._parts: list[str] = []  # of the text of the open item

    def take(self, deltas: Sequence[Delta], logprobs: Sequence[list[Any]] = ()) -> Iterator[Event]:
        """Add what is new; the events that tell of it.

        Args:
            deltas: What is new.
            logprobs: Of the tokens of each delta that is content.
        """
        told = iter(logprobs)
        for delta in deltas:
            if isinstance(delta, Reasoning):
                yield from self._add_text("reasoning", delta.text)
            elif isinstance(delta, Content):
                yield from self._add_text("message", delta.text, next(told, []))
            elif isinstance(delta, ToolCallStart):
                yield from self._close()
                yield from self._add(_call(delta))
            else:
                self._parts.append(delta.text)
                place = {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1}
                yield "response.function_call_arguments.delta", {**place, "delta": delta.text}

    def finish(self, *, complete: bool) -> Iterator[Event]:
        """Nothing more comes; the events that end what is open.

        Args:
            complete: Whether the last item is.
        """
        yield from self._close("completed" if complete else "incomplete")

    def _add(self, item: dict[str, Any]) -> Iterator[Event]:
        self._is_open = True
        self.output.append(item)
        yield "response.output_item.added", {"output_index": len(self.output) - 1, "item": _copy(item)}

    def _add_text(self, kind: str, text: str, logprobs: list[Any] | None = None) -> Iterator[Event]:
        if not self._is_open or self.output[-1]["type"] != kind:
            yield from self._close()
            yield from self._add(_NEW[kind]())
            part = _PARTS[kind]()
            self.output[-1]["content"].append(part)
            yield "response.content_part.added", {**self._place(), "part": _copy(part)}
        self._parts.append(text)
        if logprobs is None:
            yield "response.reasoning_text.delta", {**self._place(), "delta": text}
        else:
            self.output[-1]["content"][0]["logprobs"] += logprobs
            yield "response.output_text.delta", {**self._place(), "delta": text, "logprobs": logprobs}

    def _place(self) -> dict[str, Any]:
        last = len(self.output) - 1
        return {"item_id": self.output[last]["id"], "output_index": last, "content_index": 0}

    def _close(self, status: str = "completed") -> Iterator[Event]:
        """End the item that is open."""
        if not self._is_open:
            return
        item, place, text = self.output[-1], self._place(), "".join(self._parts)
        self._is_open, self._parts = False, []
        if item["type"] == "function_call":
            item["arguments"] = text
            del place["content_index"]
            told = {"arguments": text, "name": item["name"]}
            yield "response.function_call_arguments.done", {**place, **told}
        else:
            part = item["content"][0]
            part["text"] = text
            if item["type"] == "message":
                yield "response.output_text.done", {**place, "text": text, "logprobs": part["logprobs"]}
            else:
                yield "response.reasoning_text.done", {**place, "text": text}
            yield "response.content_part.done", {**place, "part": _copy(part)}
        item["status"] = status
        yield "response.output_item.done", {"output_index": place["output_index"], "item": _copy(item)}


def _call(start: ToolCallStart) -> dict[str, Any]:
    identity = f"fc_{secrets.token_hex(12)}"
    return {
        "id": identity,
        "type": "function_call",
        "status": "in_progress",
        "call_id": start.id,
        "name": start.name,
        "arguments": "",
    }


def _message() -> dict[str, Any]:
    identity = f"msg_{secrets.token_hex(12)}"
    return {
        "id": identity,
        "type": "message",
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }


def _reasoning() -> dict[str, Any]:
    identity = f"rs_{secrets.token_hex(12)}"
    return {"id": identity, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}


_NEW: dict[str, Callable[[], dict[str, Any]]] = {"message": _message, "reasoning": _reasoning}

_PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "message": lambda: {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    "reasoning": lambda: {"type": "reasoning_text", "text": ""},
}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """An item as it is now."""
    copied: dict[str, Any] = json.loads(json.dumps(item))
    return copied
