# SPDX-License-Identifier: Apache-2.0
"""The chat page in a browser, against a server that says what a test wants."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from nemo_build.runtime.server import page as page_files
from nemo_build.runtime.server.page import FILES

from .browser import browser, needs_chromium
from .page_driver import Page, opened, until
from .page_server import FakeServer, content, end, thought

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with FakeServer().serving() as server:
        yield server


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture
def page(chromium, fake) -> Iterator[Page]:
    fake.reset()
    with opened(chromium, fake.address) as page:
        yield page


def test_files_are_served_with_tags_and_a_policy(fake):
    with httpx.Client(base_url=fake.address) as client:
        for path, (_, media_type) in FILES.items():
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == media_type
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            tag = answer.headers["etag"]
            for held in (tag, f'"other", W/{tag}'):
                again = client.get(path, headers={"If-None-Match": held})
                assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
            assert client.get(path, headers={"If-None-Match": '"other"'}).content == answer.content
            assert client.head(path).headers["etag"] == tag
    files = {p.name for p in Path(page_files.__file__).parent.iterdir() if p.suffix != ".py" and p.is_file()}
    assert {name for name, _ in FILES.values()} == files


def test_an_answer_streams_and_thinking_collapses(page, fake):
    fake.pause = 0.05
    fake.script = lambda body: [
        *thought("let ", "me ", "think. "),
        *content("It ", "is ", "**so", "**."),
        *end(),
    ]
    page.send("Is it so?")
    page.page.locator(".thinking[open]").wait_for()
    assert page.text("#status") == "Thinking …"
    page.page.locator(".thinking:not([open])").wait_for()
    assert page.text("#status") == "Answering …"
    page.done()
    assert page.text(".answer > .text") == "It is so."
    assert page.text(".answer > .text strong") == "so"
    assert page.text("summary") == "Thinking · 3 tokens"
    page.page.locator("summary").click()
    assert page.text(".thinking .text").strip() == "let me think."
    figures = page.text(".figures")
    for part in (
        "8 tokens · ",
        " tokens/s · first after 0.",
        "acceptance length 2.50",
        "63 % drafted",
        "prompt 9, 4",
    ):
        assert part in figures
    assert page.text("#status") == "Done."
    assert page.page.title() == "fake · nemo-build"


def test_events_may_be_cut_anywhere(page, fake):
    fake.piece, fake.pause = 1, 0.0005
    fake.script = lambda body: [*content("naïve ", "🙂 ", "\u2028日本"), *end()]
    page.send("x")
    page.done()
    assert page.page.locator(".answer > .text").text_content() == "naïve 🙂 \u2028日本"


def test_stop_frees_the_slot_and_keeps_what_came(page, fake):
    fake.pause = 0.02
    fake.script = lambda body: content(*["word "] * 500)
    for way in ("Escape", "button"):
        page.send("go on")
        page.page.locator(".answer:last-child .token").nth(3).wait_for()
        assert fake.running == 1
        if way == "Escape":
            page.page.keyboard.press("Escape")
        else:
            page.page.get_by_role("button", name="Stop").click()
        page.done()
        until(lambda: fake.running == 0)
        assert page.text(".notes") == "Stopped."
        assert page.text(".answer > .text").startswith("word word")
    fake.script = lambda body: [*content("fine"), *end()]
    page.send("again")
    page.done()
    assert page.text(".answer > .text") == "fine"
    assert fake.bodies[-1]["messages"][1]["content"].startswith("word word")


def test_errors_are_shown_and_can_be_tried_again(page, fake):
    fake.script = lambda body: (400, "top_p must be above 0")
    page.send("x")
    page.done()
    assert page.text(".error p") == "top_p must be above 0 (top_p)"
    assert page.page.locator(".answer").count() == 0
    assert len(page.problems) == 1  # the browser itself tells the status
    assert "400" in page.problems.pop()
    fake.script = lambda body: [*content("half "), {"error": {"message": "The engine fails: nan"}}]
    page.page.get_by_role("button", name="Try again").click()
    page.page.get_by_text("The engine fails: nan").wait_for()
    assert page.text(".answer > .text") == "half "
    assert page.text(".notes") == "Broken off."
    fake.script = lambda body: content("torn")
    page.page.get_by_role("button", name="Try again").click()
    page.done()
    fake.script = lambda body: [*content("whole"), *end()]
    page.send("more")
    page.done()
    assert page.page.locator(".error").count() == 0
    assert [m["role"] for m in fake.bodies[-1]["messages"]] == ["user", "assistant", "user"]


def test_a_server_that_is_gone_is_told(chromium):
    with FakeServer().serving() as server:
        page = Page(chromium, server.address)
        page.page.locator("#model", has_text="fake").wait_for()
    page.send("x")
    page.page.get_by_text("The server cannot be reached.").wait_for()
    assert page.page.locator("#send").is_visible()
    page.context.close()


def test_a_call_of_a_tool_is_shown_and_goes_on_with_its_result(page, fake):
    def part(index, **function):
        more = {"id": f"call-{index}", "type": "function"} if "name" in function else {}
        return {"choices": [{"delta": {"tool_calls": [{"index": index, **more, "function": function}]}}]}

    fake.script = lambda body: (
        [
            *thought("hm"),
            *content("I look. "),
            part(0, name="weather", arguments=""),
            part(0, arguments='{"city": "Ro'),
            part(0, arguments='me"}'),
            part(1, name="now", arguments="{}"),
            *end("tool_calls"),
        ]
        if body["messages"][-1]["role"] == "user"
        else [*content("Sunny."), *end()]
    )
    page.page.locator("#toggle").click()
    page.page.get_by_label("Tools").fill("[{]")
    assert "not JSON" in page.text("#tools-problem")
    page.send("Weather?")
    assert fake.bodies == []  # nothing is sent with settings that are wrong
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    page.page.get_by_label("Tools").fill(json.dumps(tools))
    page.send("Weather?")
    page.done()
    assert fake.bodies[-1]["tools"] == tools
    assert page.page.locator(".call h3").all_text_contents() == ["Calls weather", "Calls now"]
    assert page.page.locator(".call pre").first.inner_text() == '{\n  "city": "Rome"\n}'
    fields = page.page.get_by_label("Its result")
    fields.nth(0).fill("sun")
    fields.nth(1).fill("noon")
    page.page.keyboard.press("Enter")
    page.page.get_by_text("Sunny.").wait_for()
    page.done()
    question, call, *results = fake.bodies[-1]["messages"]
    assert question == {"role": "user", "content": "Weather?"}
    assert call["reasoning_content"] == "hm"
    assert call["content"] == "I look. "
    functions = [c["function"] for c in call["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": '{"city": "Rome"}'},
        {"name": "now", "arguments": "{}"},
    ]
    assert results == [
        {"role": "tool", "tool_call_id": "call-0", "content": "sun"},
        {"role": "tool", "tool_call_id": "call-1", "content": "noon"},
    ]


def test_settings_are_sent_and_kept(page, fake):
    page.send("x")
    page.done()
    plain = {
        "model": "fake",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "nemo": {"tokens": True},
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert fake.bodies[-1] == plain
    page.page.locator("#toggle").click()
    values = {
        "Temperature": "0.5",
        "Top p": "0.9",
        "Most tokens": "12",
        "Seed": "-7",
        "Most tokens of it": "64",
    }
    for label, value in values.items():
        page.page.get_by_label(label, exact=True).fill(value)
    page.page.get_by_label("System message").fill("Be brief.")
    page.page.get_by_label("Draft tokens ahead").uncheck()
    page.page.reload()
    page.page.locator("#model", has_text="fake").wait_for()
    page.send("x")
    page.done()
    asked = {
        **plain,
        "messages": [{"role": "system", "content": "Be brief."}, *plain["messages"]],
        "nemo": {"tokens": True, "speculate": False},
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 12,
        "seed": -7,
        "thinking_token_budget": 64,
    }
    assert fake.bodies[-1] == asked
    page.page.locator("#toggle").click()
    page.page.get_by_label("Think before answering").uncheck()
    page.send("y")
    page.done()
    assert fake.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "thinking_token_budget" not in fake.bodies[-1]


def test_an_api_key_is_asked_for_and_kept_for_the_tab_only(page, fake):
    fake.key = "secret"
    page.page.reload()
    page.page.get_by_text("wants an API key").wait_for()
    page.send("x")
    page.page.get_by_text("The API key is wrong.").wait_for()
    assert page.page.evaluate("document.activeElement.id") == "key"
    page.page.keyboard.type("secret")
    page.page.get_by_role("button", name="Try again").click()
    page.done()
    assert page.text(".answer > .text") == "yes"
    assert page.page.evaluate("[localStorage.length, sessionStorage.getItem('nemo.key')]") == [0, "secret"]
    assert all("401" in problem for problem in page.problems)
    page.problems.clear()


def test_regenerate_edit_copy_and_new_chat(page, fake):
    answers = iter(("one", "two", "`three`", "four", "five"))
    fake.script = lambda body: [*content(next(answers)), *end()]
    for text in ("first", "second"):
        page.send(text)
        page.done()
    assert page.page.get_by_role("button", name="Regenerate").count() == 1
    page.page.get_by_role("button", name="Regenerate").click()
    page.done()
    assert [m["content"] for m in fake.bodies[-1]["messages"]] == ["first", "one", "second"]
    page.page.locator(".answer").last.get_by_role("button", name="Edit").click()
    page.page.get_by_label("Answer", exact=True).locator("textarea").fill("**mine**")
    page.page.get_by_role("button", name="Save").click()
    assert page.text(".answer > .text strong") == "mine"
    page.send("third")
    page.done()
    assert [m["content"] for m in fake.bodies[-1]["messages"]] == [
        "first",
        "one",
        "second",
        "**mine**",
        "third",
    ]
    page.page.evaluate(
        "() => { document.execCommand = () => { window.copied = document.activeElement.value } }"
    )
    page.page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject() }")
    page.page.locator(".answer").nth(1).get_by_role("button", name="Copy").click()
    until(lambda: page.page.evaluate("window.copied") == "**mine**")
    page.page.locator(".question").nth(1).get_by_role("button", name="Edit").click()
    assert page.page.locator("#input").input_value() == "second"
    page.page.keyboard.press("Enter")
    page.done()
    assert [m["content"] for m in fake.bodies[-1]["messages"]] == ["first", "one", "second"]
    page.page.get_by_role("button", name="New chat").click()
    assert page.page.locator(".turn").count() == 0
    assert page.page.locator("#empty").is_visible()


def test_new_chat_stops_the_answer_that_comes(page, fake):
    fake.pause = 0.02
    fake.script = lambda body: content(*["word "] * 500)
    page.send("x")
    page.page.locator(".token").first.wait_for()
    page.page.get_by_role("button", name="New chat").click()
    until(lambda: fake.running == 0)
    page.page.locator("#send").wait_for()
    assert page.page.locator("#turns > *").count() == 0
    assert page.text("#status") == ""


def test_keys_and_labels(page, fake):
    assert page.page.evaluate("document.activeElement.id") == "input"
    page.page.keyboard.type("a")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("b")
    assert fake.bodies == []
    page.page.keyboard.press("Enter")
    page.done()
    assert fake.bodies[-1]["messages"][-1]["content"] == "a\nb"
    assert page.page.evaluate("document.activeElement.id") == "input"
    page.page.locator("#toggle").click()
    assert page.page.locator("#toggle").get_attribute("aria-expanded") == "true"
    page.page.keyboard.press("Escape")
    assert page.page.locator("#settings").is_hidden()
    unnamed = """[...document.querySelectorAll("input, textarea, button")].filter(
        e => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).length"""
    assert page.page.evaluate(unnamed) == 0
    assert page.page.locator("#status").get_attribute("aria-live") == "polite"
