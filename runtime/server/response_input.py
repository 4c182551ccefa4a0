# SPDX-License-Identifier: Apache-2.0
"""From the items of ``/v1/responses`` to the messages of a conversation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nemo_build.runtime.server.errors import ApiError

__all__ = ["messages_of"]

_TEXTS = ("input_text", "output_text", "text")


def messages_of(given: str | list[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation of an input.

    Reasoning, text and calls that follow each other are one message of the assistant.

    Args:
        given: A text of the user's, or items.
        instructions: Come first, as a system message.

    Raises:
        ApiError: An item is of an unknown kind, or malformed.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for i, item in enumerate(given):
        kind = item.get("type", "message")
        take = _KINDS.get(kind) if isinstance(kind, str) else None
        if take is None:
            raise _wrong(f"input[{i}].type", f"there are only items of the types {', '.join(_KINDS)}")
        take(item, f"input[{i}]", messages)
    return messages


def _wrong(place: str, problem: str) -> ApiError:
    return ApiError(400, f"{place}: {problem}.", param=place, code="invalid_value")


def _string(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _wrong(f"{where}.{name}", "a string is needed")
    return value


def _text(content: object, where: str) -> str:
    """A text, or parts of one."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(where, "a string or a list of parts is needed")
    texts = []
    for i, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") in _TEXTS):
            raise _wrong(f"{where}[{i}]", f"there are only parts of the types {', '.join(_TEXTS)}")
        texts.append(_string(part, "text", f"{where}[{i}]"))
    return "\n".join(texts)


def _take_message(item: dict[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    role, text = _string(item, "role", where), _text(item.get("content"), f"{where}.content")
    if role not in ("system", "developer", "user", "assistant"):
        raise _wrong(f"{where}.role", "it must be system, developer, user or assistant")
    last = messages[-1] if messages else {}
    if role == last.get("role") == "assistant" and not (last["content"] or last.get("tool_calls")):
        last["content"] = text  # that of what has only reasoned so far
    else:
        messages.append({"role": role, "content": text})


def _take_call(item: dict[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
    call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _take_output(item: dict[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    text = _text(item.get("output"), f"{where}.output")
    messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})


def _take_reasoning(item: dict[str, Any], where: str, messages: list[dict[str, Any]]) -> None:
    content = item.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if texts:
        messages.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(texts)})


_KINDS: dict[str, Callable[[dict[str, Any], str, list[dict[str, Any]]], None]] = {
    "message": _take_message,
    "function_call": _take_call,
    "function_call_output": _take_output,
    "reasoning": _take_reasoning,
}
"""What takes an item, by its type."""
