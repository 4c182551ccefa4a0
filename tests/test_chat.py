# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy
import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nemo_build
from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime.chat import ChatTemplate

# Written for this test after the published behaviour of the family's template: always a system block, tools
# in it, tool results in a user turn, reasoning before the last user message dropped.
NEMOTRON = r"""
{%- set enable_thinking = enable_thinking if enable_thinking is defined else true -%}
{%- set truncate = truncate_history_thinking if truncate_history_thinking is defined else true -%}
{%- macro fields(mapping, skipped) -%}
    {%- for key, value in mapping | items if key not in skipped -%}
        {{- '\n<' ~ key ~ '>' -}}
        {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string -}}
        {{- '</' ~ key ~ '>' -}}
    {%- endfor -%}
{%- endmacro -%}
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages if message.role == 'user' -%}
    {%- set ns.last_user = messages.index(message) -%}
{%- endfor -%}
{%- if messages[0].role == 'system' -%}
    {%- set system, rest, start = messages[0].content, messages[1:], 1 -%}
{%- else -%}
    {%- set system, rest, start = '', messages, 0 -%}
{%- endif -%}
{{- '<|im_start|>system\n' ~ system -}}
{%- if tools -%}
    {{- '\n\n# Tools\n\n<tools>' -}}
    {%- for tool in tools -%}
        {%- set function = tool.function if tool.function is defined else tool -%}
        {{- '\n<function>\n<name>' ~ function.name ~ '</name>' -}}
        {%- if function.description is defined %}{{ '\n<description>' ~ function.description | trim ~ '</description>' }}{% endif -%}
        {{- '\n<parameters>' -}}
        {%- if function.parameters is defined and function.parameters is mapping -%}
            {%- for name, schema in (function.parameters.properties or {}) | items -%}
                {{- '\n<parameter>\n<name>' ~ name ~ '</name>' -}}
                {{- fields(schema, ['name']) ~ '\n</parameter>' -}}
            {%- endfor -%}
            {{- fields(function.parameters, ['type', 'properties']) -}}
        {%- endif -%}
        {{- '\n</parameters>\n</function>' -}}
    {%- endfor -%}
    {{- '\n</tools>' -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- for message in rest -%}
    {%- if message.role == 'assistant' -%}
        {%- set reasoning = message.reasoning_content | default('', true) -%}
        {%- set content = message.content | default('', true) | trim -%}
        {{- '<|im_start|>assistant\n' -}}
        {%- if reasoning and not (truncate and start + loop.index0 < ns.last_user) -%}
            {{- '<think>\n' ~ reasoning ~ '</think>' ~ content -}}
        {%- else -%}
            {{- '<think></think>' ~ content -}}
        {%- endif -%}
        {%- for call in message.tool_calls or [] -%}
            {%- set call = call.function if call.function is defined else call -%}
            {{- '\n<tool_call>\n<function=' ~ call.name ~ '>\n' -}}
            {%- for name, value in (call.arguments or {}) | items -%}
                {{- '<parameter=' ~ name ~ '>\n' -}}
                {{- value | tojson if value is mapping or (value is sequence and value is not string) else value | string -}}
                {{- '\n</parameter>\n' -}}
            {%- endfor -%}
            {{- '</function>\n</tool_call>\n' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.previtem is not defined or loop.previtem.role != 'tool' %}{{ '<|im_start|>user\n' }}{% endif -%}
        {{- '<tool_response>\n' ~ message.content ~ '\n</tool_response>\n' -}}
        {%- if loop.nextitem is not defined or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif -%}
    {%- else -%}
        {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\n' ~ ('<think>\n' if enable_thinking else '<think></think>') -}}
{%- endif -%}
"""  # noqa: E501

# Blocks and lines whose white space the environment must treat as Hugging Face's does, and its extensions.
BLOCKS = """{{ bos_token }}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% generation %}
        {% set shown = message.content | default('-') %}
{{ message.role }}: {{ shown }}{{ '!' if loop.last }}
    {% endgeneration %}
    {% if loop.index == 4 %}
        {% break %}
    {% endif %}
{% endfor %}
{% generation %}{% set inner = 1 %}{% endgeneration %}
{{ shown is defined }} {{ inner is defined }} {{ tools | tojson(indent=2) }}
{{ messages | tojson }}{{ dict(a=1) | tojson(separators=(',', ':')) }} {{ documents is none }} {{ extra }}
"""

demo = Path(nemo_build.__file__).parent / "demo" / "checkpoint" / "chat_template.jinja"
TEMPLATES = {"nemotron": NEMOTRON, "blocks": BLOCKS}
if demo.exists():
    TEMPLATES["demo"] = demo.read_text(encoding="utf-8")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def huggingface() -> Callable[..., str]:
    """``apply_chat_template`` of a tokenizer whose vocabulary does not matter."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)

    def render(template: str, messages: Any, **kwargs: Any) -> str:
        # Theirs refuses both switches at once, ours lets the second one win.
        kwargs["add_generation_prompt"] = not kwargs.get("continue_final_message", False)
        text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)
        assert isinstance(text, str)
        return text

    return render


@cache
def compiled(template: str) -> ChatTemplate:
    return ChatTemplate(template, special_tokens=SPECIAL)


def ours(template: str, messages: Any, **kwargs: Any) -> str:
    return compiled(template).render(messages, **kwargs)


# --- the same text as Hugging Face -------------------------------------------------------------------------

words = st.text(max_size=12) | st.sampled_from(["<b>&\"'</b>", "{{ 1 }}", "<|im_end|>", " é\n", "日本"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(words, values, max_size=3)
calls = st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": words, "arguments": arguments})},
    optional={"id": words},
)
assistant = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | words},
    optional={
        "reasoning_content": st.none() | words,
        "reasoning": words,
        "tool_calls": st.lists(calls, max_size=2) | st.none(),
    },
)
others = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": words})
conversations = st.lists(assistant | others, min_size=1, max_size=6)
functions = st.fixed_dictionaries(
    {"name": words},
    optional={
        "description": words,
        "parameters": st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(words, arguments, max_size=2)},
            optional={"required": st.lists(words, max_size=2)},
        ),
    },
)
tool_lists = st.none() | st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": functions}), max_size=2
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(deadline=None)
@given(messages=conversations, tools=tool_lists, thinking=st.booleans(), truncate=st.booleans())
def test_as_apply_chat_template(
    huggingface: Callable[..., str], name: str, messages: Any, tools: Any, thinking: bool, truncate: bool
) -> None:
    before = copy.deepcopy((messages, tools))
    kwargs = {"tools": tools, "extra": "<x>"}
    kwargs |= {"enable_thinking": thinking, "truncate_history_thinking": truncate}
    expected = huggingface(TEMPLATES[name], messages, **kwargs)
    assert ours(TEMPLATES[name], messages, **kwargs) == expected
    assert (messages, tools) == before


@pytest.mark.parametrize("content", ["Once upon", "Once upon ", "  <think>\n"])
@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"blocks"}))
def test_continuing_as_apply_chat_template(huggingface: Callable[..., str], name: str, content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    text = ours(TEMPLATES[name], messages, continue_final_message=True)
    assert text == huggingface(TEMPLATES[name], messages, continue_final_message=True)
    assert text.endswith(content.strip()) or text.endswith(content)


# --- the family's format -----------------------------------------------------------------------------------


def test_the_familys_format() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Ask the tool.\n",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Köln", "days": [1, 2]}}}],
        },
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "dry"},
    ]
    tools = [{"type": "function", "function": {"name": "weather", "description": " Forecast <b> "}}]
    assert ours(NEMOTRON, messages, tools=tools) == (
        "<|im_start|>system\n\n\n# Tools\n\n<tools>\n<function>\n<name>weather</name>"
        "\n<description>Forecast <b></description>\n<parameters>\n</parameters>\n</function>\n</tools>"
        "<|im_end|>\n"
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nAsk the tool.\n</think>\n<tool_call>\n<function=weather>\n"
        "<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n"
        "</function>\n</tool_call>\n<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\ndry\n</tool_response>\n"
        "<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_thinking_off_and_old_reasoning() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "hi", "reasoning": "hm\n"}, *HELLO]
    # The same user message twice: `messages.index` of this test's template finds the first.
    messages[2] = {"role": "user", "content": "bye"}
    assert "<think></think>hi" in ours(NEMOTRON, messages)
    assert "<think>\nhm\n</think>hi" in ours(NEMOTRON, messages, truncate_history_thinking=False)
    assert ours(NEMOTRON, messages, enable_thinking=False).endswith("assistant\n<think></think>")
    assert ours(NEMOTRON, messages, add_generation_prompt=False).endswith("bye<|im_end|>\n")


# --- what is brought into one form -------------------------------------------------------------------------


def test_arguments_as_json_text_become_an_object() -> None:
    def call(value: object) -> list[dict[str, Any]]:
        function = {"name": "f", "arguments": value}
        return [*HELLO, {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]

    assert ours(NEMOTRON, call('{"a": {"b": "é"}}')) == ours(NEMOTRON, call({"a": {"b": "é"}}))
    assert ours(NEMOTRON, call("")) == ours(NEMOTRON, call({}))


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\na\nb<" in ours(NEMOTRON, [{"role": "user", "content": parts}])


def test_developer_is_system() -> None:
    text = ours(NEMOTRON, [{"role": "developer", "content": "x"}, *HELLO])
    assert text.startswith("<|im_start|>system\nx<")


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_names_of_reasoning(name: str) -> None:
    message = {"role": "assistant", "content": "c", name: "why"}
    text = ours("{{ messages[1].reasoning_content }} {{ messages[1].thinking }}", [*HELLO, message])
    assert text == "why why"


def test_special_tokens_can_be_overridden() -> None:
    assert ours("{{ bos_token }}{{ eos_token }}", HELLO, bos_token="B") == "B</s>"


def test_clock() -> None:
    template = ChatTemplate("{{ strftime_now('%d %B %Y') }}", clock=lambda: datetime(2024, 2, 29))
    assert template.render(HELLO) == "29 February 2024"


# --- errors in the request ---------------------------------------------------------------------------------


def problems(messages: Any, template: str = NEMOTRON, **kwargs: Any) -> tuple[str, ...]:
    with pytest.raises(RequestError) as caught:
        ours(template, messages, **kwargs)
    return caught.value.problems


def test_all_problems_at_once() -> None:
    found = problems(
        [
            {"role": "User", "content": "x"},
            {"role": "user", "content": 5},
            {"role": "user"},
            "hello",
            {"role": "user", "content": [{"type": "image_url"}, {"type": "text"}, "x"]},
            {"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}, 3]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]},
            {"role": "assistant", "tool_calls": {"a": 1}, "reasoning": ["x"]},
            {"role": "tool", "content": "x", "tool_calls": [{"name": "f"}]},
        ],
        tools=[{"type": "function"}, 3],
        date=datetime(2024, 1, 1),
    )
    # In this order: the variables, the tools, the messages.
    starts = ["date", "tools[0]", "tools[1]"]
    starts += ["messages[0].role", "messages[1].content", "messages[2].content", "messages[3]"]
    starts += [*(f"messages[4].content[{i}]" for i in range(3))]
    starts += ["messages[5].tool_calls[0]", "messages[5].tool_calls[1]", "messages[6].tool_calls[0]"]
    starts += ["messages[7].tool_calls[0]", "messages[8].tool_calls", "messages[8]", "messages[9].tool_calls"]
    assert len(found) == len(starts)
    for problem, start in zip(found, starts, strict=True):
        assert problem.startswith(start)


@pytest.mark.parametrize("messages", [[], None, "hello", {"role": "user"}])
def test_no_messages(messages: Any) -> None:
    assert problems(messages) == ("messages must be a list of at least one message",)


def test_tools_that_are_no_list() -> None:
    assert problems(HELLO, tools={"name": "f"})[0].startswith("tools must be a list")


def test_deep_nesting() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert problems(HELLO, extra=deep) == ("its data is nested too deeply",)


def test_the_templates_own_refusal() -> None:
    template = "{{ raise_exception('roles must alternate: ' ~ messages[0].role) }}"
    assert problems(HELLO, template) == ("roles must alternate: user",)


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0].x.y }}", "{{ messages[0].content + 1 }}", "{{ messages[0].content | items | list }}"],
)
def test_a_template_that_cannot_cope_with_the_messages(template: str) -> None:
    assert problems(HELLO, template)


@pytest.mark.parametrize(
    "messages", [HELLO, [{"role": "assistant", "content": None}], [{"role": "assistant", "reasoning": "x"}]]
)
def test_nothing_to_continue(messages: Any) -> None:
    assert problems(messages, continue_final_message=True)[0].startswith("continue_final_message needs")


def test_a_template_without_the_message_to_continue() -> None:
    with pytest.raises(RequestError, match="leaves out"):
        ours("-", [{"role": "assistant", "content": "x"}], continue_final_message=True)


# --- sandbox -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression",
    [
        "messages.__class__",
        "''.__class__.__mro__",
        "''['__class__']['mro']()",
        "(''|attr('__class__'))|attr('mro')",
        "raise_exception.__globals__",
        "dict.__globals__['__builtins__']",
        "strftime_now.__closure__",
        "cycler.__init__.__globals__",
        "namespace.__init__.__globals__",
        "lipsum.__globals__.os",
        "'{0.__class__}'.format(1)",
        "messages.append(1)",
        "messages[0].update({'a': 1})",
        "messages[0].pop('role')",
        "messages.clear()",
        "self.__init__.__globals__",
    ],
)
def test_forbidden(expression: str) -> None:
    try:
        text = ours("{{ " + expression + " }}", HELLO)
    except (BundleError, RequestError):
        return
    assert text == ""  # undefined: the template got hold of nothing


def test_security_violations_are_the_templates_fault() -> None:
    with pytest.raises(BundleError, match="may not do"):
        ours("{{ messages.append(1) }}", HELLO)


def test_mappings_cannot_be_changed_through_their_class() -> None:
    with pytest.raises((BundleError, RequestError)):
        ours("{{ dict.update(messages[0], {'content': 'x'}) }}{{ messages[0].content }}", HELLO)


class Loud(str):
    def shout(self) -> str:
        raise AssertionError("a template called a method of the caller's object")


def test_templates_see_plain_values_only() -> None:
    text = Loud("x")
    assert problems([{"role": "user", "content": text}], "{{ messages[0].content.shout() }}")
    assert problems(HELLO, extra={"a": object()}) == ("extra.a is no JSON value but a object",)


# --- loading -----------------------------------------------------------------------------------------------


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        path = directory / {"jinja": "chat_template.jinja", "config": "tokenizer_config.json"}[name]
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return directory


def test_file_goes_before_config(tmp_path: Path) -> None:
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    write(tmp_path, config={"chat_template": "config"} | tokens)
    assert ChatTemplate.load(tmp_path).render(HELLO) == "config"
    write(tmp_path, jinja="file {{ bos_token }}{{ eos_token }}{{ pad_token }}")
    assert ChatTemplate.load(tmp_path).render(HELLO) == "file <s></s>"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate.load(write(tmp_path, config={"chat_template": named}))
    assert template.render(HELLO) == "plain"
    assert template.render(HELLO, tools=[]) == "tools"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("other", encoding="utf-8")
    write(tmp_path, jinja="file")
    template = ChatTemplate.load(tmp_path)
    assert (template.render(HELLO), template.render(HELLO, tools=[{"name": "f"}])) == ("file", "other")


def test_the_only_template_is_the_default(tmp_path: Path) -> None:
    only = [{"name": "chatml", "template": "x"}]
    assert ChatTemplate.load(write(tmp_path, config={"chat_template": only})).render(HELLO) == "x"


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({}, "neither chat_template.jinja nor"),
        ({"config": {}}, "neither chat_template.jinja nor"),
        ({"config": "{"}, "Expecting property name"),
        ({"config": []}, "no JSON object"),
        ({"config": {"chat_template": 3}}, "3 is no template"),
        ({"config": {"chat_template": [{"name": "a"}]}}, "is no template"),
        ({"config": {"chat_template": [{"name": n, "template": ""} for n in "ab"]}}, "'default'"),
        ({"jinja": "ok\n{% if %}"}, "template 'default', line 2"),
        ({"jinja": "{{ x | no_such_filter }}"}, "no_such_filter"),
        ({"jinja": "{% generation %}"}, "line 1"),
    ],
)
def test_damaged(tmp_path: Path, files: dict[str, Any], named: str) -> None:
    with pytest.raises(BundleError) as caught:
        ChatTemplate.load(write(tmp_path, **files))
    assert named in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_file_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BundleError):
        ChatTemplate.load(tmp_path)
