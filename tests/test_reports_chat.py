# SPDX-License-Identifier: Apache-2.0
"""Public bug reports of other runtimes about reasoning and tool calls, as behaviours of this one's parsers.

Reports whose behaviour is tested elsewhere:

- vllm#39581, ``reasoning_effort`` that is ignored: ``test_chat_effort``
- vllm-mlx#55, a tag that pieces cut: all tests of ``answers.parse`` cut at every place
"""

from __future__ import annotations

import json

import pytest

from nemo_build.demo import CHECKPOINT
from nemo_build.runtime.chat import (
    AnswerParser,
    ChatTemplate,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
    opens_thinking,
)

from .answers import Answer, call, deltas_of, parse, tool

TOOLS = [tool("weather", {"city": "string", "days": "integer"})]
CALL = call("weather", {"city": "Köln", "days": "2"})
WEATHER = ("weather", '{"city": "Köln", "days": 2}')
HELLO = [{"role": "user", "content": "Hello"}]


def test_content_is_there_behind_reasoning() -> None:
    """vllm#39103: with reasoning separated, content was null."""
    assert parse("Easy.\n</think>\nFour.", thinking=True) == Answer("Easy.\n", "Four.")


def test_without_thinking_all_text_is_content() -> None:
    """NVIDIA/TensorRT-LLM#14502: with ``enable_thinking=false`` the answer came as reasoning, and content was empty."""
    prompt = ChatTemplate.load(CHECKPOINT).render(HELLO, enable_thinking=False)
    assert parse("Four.", thinking=opens_thinking(prompt)) == Answer("", "Four.")


@pytest.mark.parametrize("reasoning", ["Ask.\n", ""])
def test_a_call_ends_thinking_that_was_not_closed(reasoning: str) -> None:
    """NVIDIA/TensorRT-LLM#13684, and in a stream ollama#13764: such a call was swallowed as reasoning."""
    assert parse(reasoning + CALL, thinking=True, tools=TOOLS) == Answer(reasoning, "", [WEATHER])
    parser = AnswerParser(thinking=True, tools=TOOLS)
    deltas = [delta for piece in ("Ask.\n", *CALL) for delta in parser.push(piece)]
    assert [d.name for d in deltas if isinstance(d, ToolCallStart)] == ["weather"]


def test_with_tools_thinking_is_separated_in_a_stream() -> None:
    """vllm-mlx#161: with tools, the text of thinking was streamed as content."""
    deltas = deltas_of(f"Ask.\n</think>\nI look.\n{CALL}", thinking=True, tools=TOOLS)
    assert "".join(d.text for d in deltas if isinstance(d, Reasoning)) == "Ask.\n"
    assert "".join(d.text for d in deltas if isinstance(d, Content)) == "I look."


def test_an_end_tag_cut_in_two_before_a_second_call() -> None:
    """vllm-mlx#55: raw tags came as content."""
    for end in ("</tool_call>", "</function>", "</parameter>"):
        first, _, second = CALL.rpartition(end)
        for i in range(len(end)):
            pieces = [first + end[:i], end[i:] + second + CALL]
            deltas = deltas_of(pieces, thinking=False, tools=TOOLS)
            assert sum(isinstance(d, ToolCallStart) for d in deltas) == 2
            assert not any(isinstance(d, Content) for d in deltas)


def test_a_whole_call_in_one_piece_has_its_arguments() -> None:
    """vllm#43074: the arguments were ``{}``."""
    deltas = deltas_of([CALL], thinking=False, tools=TOOLS)
    assert [type(d) for d in deltas] == [ToolCallStart, ToolCallArguments]
    assert json.loads(deltas[1].text) == {"city": "Köln", "days": 2}  # type: ignore[union-attr]


def test_prose_about_tags_goes_on() -> None:
    """club-3090#72: behind a literal ``<tool_call>`` in prose the stream went silent."""
    parser = AnswerParser(thinking=False, tools=TOOLS)
    parser.push("Calls stand between <tool_call>")
    assert parser.push(" and") == [Content(" <tool_call> and")]
    assert parser.push(" its end.") == [Content(" its end.")]
    assert parser.finish() == []


def test_id_and_name_come_once() -> None:
    """nanoclaw#1241: they were repeated in each delta, and clients joined them."""
    deltas = deltas_of(CALL, thinking=False, tools=TOOLS)
    starts = [d for d in deltas if isinstance(d, ToolCallStart)]
    assert len(starts) == 1
    assert len(deltas) > 5
    assert all(isinstance(d, ToolCallArguments) for d in deltas[1:])


def test_the_prompt_decides_whether_the_answer_begins_with_reasoning() -> None:
    """smg#2112: a part of the model's name chose the wrong parser."""
    template = ChatTemplate("<|im_start|>assistant\n{{ '<think>\n' if enable_thinking }}")
    assert opens_thinking(template.render(HELLO, enable_thinking=True))
    assert not opens_thinking(template.render(HELLO, enable_thinking=False))


def test_arguments_come_while_they_are_written() -> None:
    """vllm#22975 and #36116: they came at the end of the call only."""
    parser = AnswerParser(thinking=False, tools=TOOLS)
    parser.push("<tool_call>\n<function=weather>\n<parameter=city>\n")
    for word in ("Kö", "ln", " am", " Rhein"):
        assert parser.push(word) == [ToolCallArguments(0, word)]
    assert parser.push("\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>") == [
        ToolCallArguments(0, '", "days": 2}')
    ]


def test_what_is_thought_is_never_more_than_what_was_written() -> None:
    """sglang#39826: an answer that ended while thinking had more tokens of reasoning than tokens."""
    parser = AnswerParser(thinking=True, tools=TOOLS)
    states = []
    for token in ("Ask", ".", "\n", "</think>", "Four", "."):
        states.append(parser.state)  # that of the text before, which the token goes on from
        parser.push(token)
    assert states.count("reasoning") == 4
    parser.finish()
    assert parser.state == "content"


def test_an_answer_that_ends_while_thinking() -> None:
    """llama.cpp#20268: nothing was left of it. It is reasoning, and content where that must not be empty."""
    text = "Let me think about"
    assert parse(text, thinking=True) == Answer(text, "")
    assert parse(text, thinking=True, force_nonempty_content=True) == Answer(text, text)
