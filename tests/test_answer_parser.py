# SPDX-License-Identifier: Apache-2.0
"""Reasoning and content of answers: what ends reasoning, and which white space is text."""

from __future__ import annotations

import time

import pytest

from nemo_build.demo import CHECKPOINT
from nemo_build.runtime.chat import AnswerParser, ChatTemplate, Content, Reasoning, opens_thinking

from .answers import Answer, call, deltas_of, join, parse, tool

TOOLS = [tool("look", {"at": "string"})]
CALL = call("look", {"at": "it"})
LOOK = ("look", '{"at": "it"}')

HELLO = [{"role": "user", "content": "Hello"}]


# --- reasoning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("why</think>so", "why", "so"),
        ("why\n</think>so", "why\n", "so"),  # Nemotron 3.5's template writes no line end of its own there
        ("\nwhy</think>so", "why", "so"),
        ("\n\nwhy</think>so", "\nwhy", "so"),
        ("  why</think>so", "  why", "so"),
        ("why</think>\n\nso\n", "why", "so\n"),
        ("why</think>\n \t\n  so", "why", "  so"),
        ("why</think> so", "why", " so"),
        ("why</think>", "why", ""),
        ("why</think>\n\n", "why", ""),
        ("</think>so", "", "so"),
        ("\n \n</think>so", "", "so"),
        ("why", "why", ""),
        ("why </thin", "why </thin", ""),
        ("why <", "why <", ""),
        ("", "", ""),
        ("\n", "", ""),
        ("why</think>so</think>then", "why", "so</think>then"),
        ("why</think>\n</think>\nso", "why", "so"),
        ("why<think>who</think>so", "why<think>who", "so"),
        ("<think>\nwhy</think>so", "why", "so"),
        ("\n<think>why</think>so", "why", "so"),
        ("<think><think>why</think>so", "<think>why", "so"),
        ("why <tool_call> not</think>so", "why <tool_call> not", "so"),
        ("ä\u2028 日本</think>é", "ä\u2028 日本", "é"),
    ],
)
def test_thinking(text: str, reasoning: str, content: str, tools: list[object] | None) -> None:
    assert parse(text, thinking=True, tools=tools) == Answer(reasoning, content)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("so", "", "so"),
        ("\n\n  so \n\n", "", "\n\n  so \n\n"),  # it may go on with what the prompt began
        ("\n \n", "", "\n \n"),
        ("", "", ""),
        ("<think></think>so", "", "so"),
        ("<think>\n\n</think>\n\nso", "", "so"),
        ("\n<think>\nwhy</think>so", "why", "so"),
        ("<think>why", "why", ""),
        ("<thin", "", "<thin"),
        ("  <thing>", "", "  <thing>"),
        ("</think>\nso", "", "so"),
        ("so <think>why</think> then", "", "so <think>why</think> then"),
        ("so</think>then", "", "so</think>then"),
    ],
)
def test_no_thinking(text: str, reasoning: str, content: str, tools: list[object] | None) -> None:
    assert parse(text, thinking=False, tools=tools) == Answer(reasoning, content)


def test_a_call_ends_reasoning() -> None:
    assert parse("why\n" + CALL + "so", thinking=True, tools=TOOLS) == Answer("why\n", "so", [LOOK])
    json_form = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>\n\n'
    assert parse("why\n" + json_form + "so", thinking=True, tools=TOOLS) == Answer("why\n", "so", [LOOK])
    assert parse("why\n" + CALL + "</think>\nso", thinking=True, tools=TOOLS) == Answer("why\n", "so", [LOOK])


@pytest.mark.parametrize(
    "quoted",
    [
        "<tool_call>",
        "<tool_call>\n<function=name>\n<parameter=at>\nx\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=look",
        '<tool_call>{"name": "other", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": ...}</tool_call>',
        '<tool_call>{"name": "look"',
        "<tool_call><tool_call>\n\n<tool_call>",
    ],
)
def test_the_form_of_a_call_quoted_in_reasoning(quoted: str) -> None:
    text = f"I am to write {quoted} now.\n"
    assert parse(f"{text}</think>so", thinking=True, tools=TOOLS) == Answer(text, "so")


def test_reasoning_and_content_come_at_once() -> None:
    parser = AnswerParser(thinking=True, tools=TOOLS)
    assert parser.push("why ") == [Reasoning("why ")]
    assert parser.push("<") == []
    assert parser.push("b>\n") == [Reasoning("<b>\n")]
    assert parser.state == "reasoning"
    assert parser.push("</think>\nso, ") == [Content("so,")]
    assert parser.state == "content"
    assert parser.push("well") == [Content(" well")]
    assert parser.push("\n") == []
    assert parser.finish() == [Content("\n")]


def test_state() -> None:
    parser = AnswerParser(thinking=True, tools=TOOLS)
    assert parser.state == "reasoning"
    states = []
    for piece in ["why", "</think>", "so", "<tool_call>", "\n<function=look>", "\n", "<parameter=at>x"]:
        parser.push(piece)
        states.append(parser.state)
    expected = ["reasoning", "content", "content", "content", "tool_call", "tool_call", "tool_call"]
    assert states == expected
    parser.push("</parameter></function>")
    assert parser.state == "content"
    assert parser.has_tool_calls
    assert AnswerParser(thinking=False).state == "content"


# --- content instead of reasoning --------------------------------------------------------------------------


def test_reasoning_becomes_content_where_there_is_nothing_else() -> None:
    options = {"thinking": True, "tools": TOOLS, "force_nonempty_content": True}
    assert parse("why not", **options) == Answer("why not", "why not")
    assert parse("why not</think>\n\n", **options) == Answer("why not", "why not")
    assert parse("why</think>so", **options) == Answer("why", "so")
    assert parse("why" + CALL, **options) == Answer("why", "", [LOOK])
    assert parse("\n", **options) == Answer()
    parser = AnswerParser(thinking=True, force_nonempty_content=True)
    assert parser.push("why") == [Reasoning("why")]
    assert parser.finish() == [Content("why")]


# --- content around calls ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (CALL, ""),
        ("\n\n" + CALL, ""),
        ("so\n\n" + CALL + "\n", "so"),
        ("so\n" + CALL + "\nthen\n", "so\n\n\nthen\n"),
        (CALL + "\n  then", "  then"),
        (CALL + "</tool_call>\n</function></think>then", "then"),
        (CALL + "then</tool_call>", "then</tool_call>"),
        (CALL + "</tool", ""),
        (CALL + "<b", "<b"),
    ],
)
def test_white_space_around_calls(text: str, content: str) -> None:
    assert parse(text, tools=TOOLS) == Answer("", content, [LOOK])


@pytest.mark.parametrize("options", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_calls_are_text(options: dict[str, object]) -> None:
    text = "so\n" + CALL
    assert parse(text, **options) == Answer("", text)
    assert parse(text + "</think>so", thinking=True, **options) == Answer(text, "so")


@pytest.mark.parametrize(
    "choice", ["auto", "required", None, {"type": "function", "function": {"name": "look"}}]
)
def test_choices_that_read_calls(choice: object) -> None:
    assert parse(CALL, tools=TOOLS, tool_choice=choice) == Answer("", "", [LOOK])


# --- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", ["Hello", "<think>", "</think>", "<think> </think>"])
def test_whether_a_prompt_opens_thinking(content: str) -> None:
    template = ChatTemplate.load(CHECKPOINT)
    messages = [{"role": "user", "content": content}]
    assert opens_thinking(template.render(messages))
    assert not opens_thinking(template.render(messages, enable_thinking=False))
    assert not opens_thinking(
        ChatTemplate("<|im_start|>{{ messages[0].content }}<|im_start|>").render(messages)
    )


def test_a_continued_message_is_content() -> None:
    prompt = ChatTemplate.load(CHECKPOINT).render(
        [*HELLO, {"role": "assistant", "content": "so"}], continue_final_message=True
    )
    assert not opens_thinking(prompt)


# --- time --------------------------------------------------------------------------------------------------

_INSIDE = "</think><tool_call>\n<function=look>\n<parameter=at>\n"
_LONG = 100_000


@pytest.mark.parametrize("beginning", ["", "</think>", _INSIDE, _INSIDE.replace("=at>", "=other>")])
@pytest.mark.parametrize(
    "piece",
    [
        *("x", "5", "[", " ", "\n", "<", "</", "<tool_call>", "<tool_call>\n", "<tool_call><function="),
        *('<tool_call>{"name"', "\n<tool_call>\n<function=look", "</parameter>\n", "\n</function>\n"),
        *("\n</tool_call>\n", "\n<parameter=at>\n", CALL),
    ],
)
def test_time_is_linear(beginning: str, piece: str) -> None:
    def seconds(length: int, by: int) -> float:
        text = beginning + piece * (length // len(piece))
        start = time.process_time()
        deltas_of((text[i : i + by] for i in range(0, len(text), by)), thinking=True, tools=TOOLS)
        return time.process_time() - start

    # Tens of times what it takes; quadratic time would be minutes.
    assert seconds(_LONG, _LONG) < 10
    assert seconds(_LONG, 1) < 30


def test_pieces_are_not_glued_one_by_one() -> None:
    text = "a " * 500_000
    assert len(join(deltas_of([text], thinking=False, tools=TOOLS)).content) == len(text)
