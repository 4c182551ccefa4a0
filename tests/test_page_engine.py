# SPDX-License-Identifier: Apache-2.0
"""The chat page in a browser, against the server with the demo engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from nemo_build.runtime import Engine
from nemo_build.runtime.server.app import create_app
from nemo_build.runtime.server.backend import EngineBackend

from .browser import browser, needs_chromium
from .page_driver import Page, opened, until
from .page_server import serving

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory, speculate="mtp", draft_length=3)


@pytest.fixture(scope="module")
def real(engine) -> Iterator[str]:
    with serving(create_app(EngineBackend(engine, speculate="mtp"))) as address:
        yield address


@pytest.fixture
def demo(chromium, real) -> Iterator[Page]:
    with opened(chromium, real) as page:
        page.page.locator("#model", has_text="engine").wait_for()
        page.page.locator("#toggle").click()
        page.page.get_by_label("Temperature").fill("0")
        yield page


def test_the_server_streams_to_the_page(demo):
    demo.send("How do I open a file?")
    demo.done()
    assert demo.page.locator(".error").count() == 0
    assert 'with open("data.txt", encoding="utf-8") as f:' in demo.text(".answer > .text .code code")
    assert "This is a simple question." in demo.page.locator(".thinking .text").text_content()
    assert demo.text("summary").startswith("Thinking · ")
    assert demo.page.locator(".answer > .text .token.by-mtp").count() > 0
    figures = demo.text(".figures")
    for part in ("tokens/s", "first after", "acceptance length", "% drafted", "prompt "):
        assert part in figures
    said = demo.text(".answer > .text")
    demo.page.get_by_label("Draft tokens ahead").uncheck()
    demo.page.get_by_role("button", name="Regenerate").click()
    demo.done()
    assert demo.page.locator("#turns .token").count() == 0
    assert demo.text(".answer > .text") == said
    demo.page.get_by_label("Think before answering").uncheck()
    demo.page.get_by_role("button", name="Regenerate").click()
    demo.done()
    assert demo.page.locator(".thinking").is_hidden()
    assert demo.text(".answer > .text")


def test_stop_frees_the_slot_of_the_engine(demo, engine):
    def endless(route) -> None:
        body = route.request.post_data_json
        route.continue_(post_data=json.dumps({**body, "ignore_eos": True, "repetition_penalty": 1.3}))

    demo.page.route("**/v1/chat/completions", endless)
    demo.page.get_by_label("Think before answering").uncheck()
    # As many steps as there is time for would do; the engine is slowed down so that there always is.
    step = engine.session.step
    engine.session.step = lambda *args, **more: (time.sleep(0.02), step(*args, **more))[1]
    try:
        demo.send("How do I open a file?")
        demo.page.locator(".answer > .text > *").first.wait_for()
        assert engine.statistics().running == 1
        demo.page.keyboard.press("Escape")
        demo.done()
        until(lambda: engine.statistics().running == 0)
    finally:
        engine.session.step = step
    assert demo.text(".notes") == "Stopped."


def test_the_model_calls_a_tool(demo):
    parameters = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    function = {"name": "lookup", "description": "Look up an object in the Python documentation."}
    tools = [{"type": "function", "function": {**function, "parameters": parameters}}]
    demo.page.get_by_label("Tools").fill(json.dumps(tools))
    demo.send("Look up `os.path.join`.")
    demo.done()
    assert demo.text(".call h3") == "Calls lookup"
    assert json.loads(demo.text(".call pre")).keys() == {"name"}
    demo.page.get_by_label("Its result").fill("join(path, *paths): Join one or more path segments.")
    demo.page.get_by_role("button", name="Send results").click()
    demo.done()
    assert demo.page.locator(".error").count() == 0
    assert demo.text(".answer:last-child > .text")


def test_what_the_server_refuses_is_told(demo):
    demo.page.get_by_label("Tools").fill('[{"type": "cat"}]')
    demo.send("x")
    demo.page.locator(".error", has_text="tools").wait_for()
    assert len(demo.problems) == 1
    assert "400" in demo.problems.pop()
