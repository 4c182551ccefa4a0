# SPDX-License-Identifier: Apache-2.0
"""Clients from PyPI talk to the server, unmodified."""

from __future__ import annotations

import asyncio
from typing import Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from nemo_build.runtime import Engine
from nemo_build.runtime.server.backend import EngineBackend
from nemo_build.runtime.server.context import Settings

from .serving import Served, served

KEY = "a key"
HELLO = [{"role": "user", "content": "hello"}]
BRIEF = {"thinking_budget": 4}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel):
    """What structured answers are to be."""

    mood: Literal["good", "bad"]
    is_sure: bool


@pytest.fixture(scope="module")
def server(demo_engine_directory) -> Served:
    engine = Engine.load(demo_engine_directory, speculate="mtp", draft_length=3, threads=1)
    settings = Settings(names=("demo", "gpt-4o"), keys=(KEY,))
    with served(EngineBackend(engine, speculate="mtp"), settings) as found:
        yield found


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


# --- OpenAI's own -------------------------------------------------------------------------------------------------


def test_openai_chat(client):
    answer = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        temperature=0,
        max_completion_tokens=80,
        logprobs=True,
        top_logprobs=1,
        user="me",
        metadata={"a": "b"},
        store=False,
        extra_body=BRIEF,
    )
    [choice] = answer.choices
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.content
    assert choice.message.reasoning_content == choice.message.reasoning
    assert choice.logprobs.content[0].top_logprobs
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5
    assert [m.id for m in client.models.list()] == ["demo", "gpt-4o"]
    assert client.models.retrieve("demo").owned_by == "nemo-build"


def test_openai_streams(client):
    stream = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    reasoning = "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks)
    whole = client.chat.completions.create(model="demo", messages=HELLO, temperature=0, max_tokens=60)
    assert (text, reasoning) == (
        whole.choices[0].message.content,
        whole.choices[0].message.reasoning_content,
    )
    assert last.usage.total_tokens == whole.usage.total_tokens
    with client.chat.completions.stream(model="demo", messages=HELLO, temperature=0, max_tokens=60) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == text


def test_openai_completions(client):
    answer = client.completions.create(model="demo", prompt=["a", "b"], max_tokens=4, logprobs=1, echo=False)
    assert len(answer.choices) == 2
    assert len(answer.choices[0].logprobs.tokens) <= 4
    pieces = client.completions.create(model="demo", prompt="a", max_tokens=4, stream=True)
    assert "".join(p.choices[0].text for p in pieces)


def test_openai_tools(client):
    answer = client.chat.completions.create(
        model="demo",
        messages=HELLO,
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        extra_body=BRIEF,
        parallel_tool_calls=False,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    messages = [
        *HELLO,
        answer.choices[0].message,
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    after = client.chat.completions.create(model="demo", messages=messages, tools=[WEATHER], max_tokens=8)
    assert after.choices
    with client.chat.completions.stream(
        model="demo",
        messages=HELLO,
        tools=[{**WEATHER, "function": {**WEATHER["function"], "strict": True}}],
        tool_choice="required",
        temperature=0,
        extra_body=BRIEF,
        parallel_tool_calls=False,
    ) as events:
        found = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert found[0].arguments == call.function.arguments
    assert found[0].parsed_arguments["city"] in ("Paris", "Rome")


def test_openai_structured_output(client):
    answer = client.chat.completions.parse(
        model="demo", messages=HELLO, response_format=Answer, temperature=0, extra_body=BRIEF
    )
    assert isinstance(answer.choices[0].message.parsed, Answer)
    found = client.responses.parse(
        model="demo",
        input="hello",
        text_format=Answer,
        temperature=0,
        extra_body={"thinking_token_budget": 4},
    )
    assert isinstance(found.output_parsed, Answer)


def test_openai_responses(client):
    found = client.responses.create(model="demo", input="hello", temperature=0, max_output_tokens=80)
    assert found.status == "completed"
    assert found.output_text
    with client.responses.stream(model="demo", input="hello", temperature=0, max_output_tokens=80) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        assert events.get_final_response().output_text == text == found.output_text
    function = {"type": "function", **WEATHER["function"], "strict": True}
    called = client.responses.create(
        model="demo",
        input="hello",
        tools=[function],
        tool_choice="required",
        temperature=0,
        reasoning={"effort": "none"},
        parallel_tool_calls=False,
    )
    [call] = [item for item in called.output if item.type == "function_call"]
    after = client.responses.create(
        model="demo",
        input=[
            {"role": "user", "content": "hello"},
            *called.output,
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
        tools=[function],
        max_output_tokens=8,
    )
    assert after.output


def test_openai_asynchronously(server):
    async def main() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:

            async def ask(i: int) -> str:
                stream = await client.chat.completions.create(
                    model="demo", messages=HELLO, seed=i, max_tokens=20, stream=True
                )
                return "".join([c.choices[0].delta.model_dump().get("reasoning") or "" async for c in stream])

            texts = await asyncio.gather(*(ask(i) for i in range(12)))
            stream = await client.chat.completions.create(
                model="demo",
                messages=HELLO,
                max_tokens=900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                break
            await stream.close()
            return texts

    texts = asyncio.run(main())
    assert len(set(texts)) > 1
    assert server.idle()


def test_openai_errors(server, client):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "x " * 3000}])
    assert found.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="demo", messages=HELLO, temperature=-1, stream=True)
    assert found.value.param == "temperature"


# --- LangChain ----------------------------------------------------------------------------------------------------


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def langchain(server: Served, **options) -> ChatOpenAI:
    """LangChain's model."""
    options = {"temperature": 0, "max_tokens": 200, "extra_body": BRIEF, **options}
    return ChatOpenAI(base_url=f"{server.url}/v1", api_key=SecretStr(KEY), model="demo", **options)


def test_langchain_chat(server):
    model = langchain(server)
    answer = model.invoke("hello")
    assert isinstance(answer, AIMessage)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    pieces = list(model.stream("hello"))
    assert "".join(p.content for p in pieces) == answer.content
    assert asyncio.run(model.ainvoke("hello")).content == answer.content
    assert model.batch(["hello", "hello"])[1].content == answer.content


def test_langchain_tools(server):
    model = langchain(server).bind_tools([get_weather], tool_choice="required", parallel_tool_calls=False)
    answer = model.invoke("hello")
    [call] = answer.tool_calls
    assert call["name"] == "get_weather"
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    after = langchain(server, max_tokens=8).bind_tools([get_weather])
    assert after.invoke([HumanMessage("hello"), answer, result])
    total = None
    for piece in model.stream("hello"):
        total = piece if total is None else total + piece
    assert [c["args"] for c in total.tool_calls] == [call["args"]]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(server, method):
    model = langchain(server).with_structured_output(Answer, method=method)
    assert isinstance(model.invoke("hello"), Answer)


def test_langchain_responses(server):
    model = langchain(server, use_responses_api=True, extra_body={"thinking_token_budget": 4})
    assert model.invoke("hello").text
    assert "".join(p.text for p in model.stream("hello")) == model.invoke("hello").text


# --- Pydantic AI --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [OpenAIChatModel, OpenAIResponsesModel])
@pytest.mark.parametrize("output", [Answer, NativeOutput(Answer)], ids=["tool", "native"])
def test_an_agent_of_pydantic_ai(server, model, output):
    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key=KEY)
    settings = ModelSettings(
        temperature=0,
        max_tokens=300,
        parallel_tool_calls=False,
        extra_body={"thinking_token_budget": 4},
    )
    agent = Agent(model("demo", provider=provider), output_type=output, model_settings=settings)
    found = agent.run_sync("hello")
    assert isinstance(found.output, Answer)
    assert found.usage.output_tokens > 0
