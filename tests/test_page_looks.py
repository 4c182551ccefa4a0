# SPDX-License-Identifier: Apache-2.0
"""How the chat page looks: what becomes of the model's text, tints, contrast, narrow screens, long answers."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from .browser import browser, needs_chromium
from .page_driver import Page, opened
from .page_server import FakeServer, content, end, thought

pytestmark = needs_chromium

HOSTILE = (
    "<img src=x onerror=\"document.title='taken'\"> <script>document.title='taken'</script>\n\n"
    "# <b onclick=alert(1)>h</b>\n- <svg onload=alert(1)>\n\n"
    "| <iframe src=//evil.example></iframe> | b |\n|---|---|\n"
    '```"><script>alert(1)</script>\n<script>alert(1)</script>\n```\n'
    "[a](javascript:alert(1)) ![b](https://evil.example/x.png)"
)


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


def test_tokens_are_tinted_by_where_they_came_from(page, fake):
    fake.script = lambda body: [*thought("a", "b"), *content("It ", "is ", "so", "."), *end()]
    page.send("x")
    page.done()
    assert page.page.locator(".thinking .token.by-mtp").all_text_contents() == ["a", "b"]
    assert page.page.locator(".answer > .text .token.by-mtp").all_text_contents() == ["is ", "."]
    ground = "e => getComputedStyle(e).backgroundColor"
    token = page.page.locator(".answer > .text .token").first
    assert token.evaluate(ground) != "rgba(0, 0, 0, 0)"
    assert "drafts of mtp" in page.text("#legend")
    page.page.locator("#toggle").click()
    page.page.get_by_label("Tint tokens").uncheck()
    assert token.evaluate(ground) == "rgba(0, 0, 0, 0)"
    assert page.page.locator("#legend").is_hidden()


def test_text_that_is_held_back_keeps_its_tints(page, fake):
    """What could be a mark comes later than its token, with others, and marks themselves do not come at all."""

    def chunk(content, *told):
        delta = {"content": content} if content else {}
        listed = [{"text": text, "drafted": drafted} for text, drafted in told]
        return {"choices": [{"index": 0, "delta": delta}], "nemo": {"tokens": listed, "speculator": "ngram"}}

    fake.script = lambda body: [
        *thought("t"),
        chunk("", ("\n\n", False), ("a", True), (" <", False)),
        chunk("a <b", ("b", True)),
        chunk("c?d", ("c", False), ("?", True), ("d", False)),
        *end(),
    ]
    page.send("x")
    page.done()
    assert page.text(".answer > .text") == "a <bc?d"
    assert page.page.locator(".answer > .text .by-ngram").all_text_contents() == ["a", "b", "?"]


def test_text_of_the_model_is_inert(page, fake):
    fake.script = lambda body: [*thought(HOSTILE), *content(*HOSTILE), *end()]
    page.send(HOSTILE)
    page.done()
    page.page.wait_for_timeout(200)
    assert page.page.title() == "fake · nemo-build"
    found = page.page.locator("#turns").locator(
        "img, script, svg, iframe, a, b, [onclick], [onerror], [onload]"
    )
    assert found.count() == 0
    text = page.text(".answer > .text")
    for part in (
        "<img src=x onerror",
        "<b onclick=alert(1)>h</b>",
        "<svg onload",
        "<iframe src",
        "javascript:",
    ):
        assert part in text
    assert page.page.locator(".answer > .text .code code").inner_text() == "<script>alert(1)</script>\n"


def test_text_is_drawn_the_same_however_it_comes(page):
    parts = [
        "**",
        "`c`",
        "*e*",
        "\n",
        "\n\n",
        "- ",
        "3. ",
        "  - ",
        "# ",
        "```\n",
        "\n```py\n",
        "| a |",
        "|---|\n",
    ]
    parts += ["> q", "word ", "`", "|", "\t", "é<b>", "\r\n"]
    rng = random.Random(1)
    cases = []
    for _ in range(300):
        text = "".join(rng.choices(parts, k=rng.randint(1, 30)))
        cases.append([text, sorted(rng.choices(range(len(text) + 1), k=8))])
    different = """async cases => {
        const { Markdown } = await import("/page/markdown.js");
        const drawn = pieces => {
            const root = document.createElement("div");
            const markdown = new Markdown(root);
            for (const piece of pieces) { markdown.push(piece); markdown.draw(); }
            return root.innerHTML;
        };
        return cases.map(([text, cuts]) => {
            const pieces = [0, ...cuts].map((cut, i) => text.slice(cut, cuts[i]));
            return [text, drawn([text]), drawn(pieces)];
        }).filter(([_, whole, pieces]) => whole !== pieces);
    }"""
    assert page.page.evaluate(different, cases) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(chromium, fake, scheme):
    """Contrast of text and its ground is at least 4.5 (WCAG 2.2, AA), that of a field's edge 3."""
    with opened(chromium, fake.address, color_scheme=scheme) as page:
        fake.script = lambda body: [*thought("t"), *content("a", "b", "\n```\nx\n```"), *end()]
        page.send("x")
        page.done()
        values = page.page.evaluate(
            "() => Object.fromEntries([...document.styleSheets[0].cssRules[0].style].filter(n => n.startsWith('--'))"
            ".map(n => [n.slice(2), getComputedStyle(document.documentElement).getPropertyValue(n)]))"
        )
        colours = {name: luminance(value) for name, value in values.items()}
        grounds = ("ground", "raised", "mtp", "dflash", "dspark", "ngram")
        pairs = [("text", ground) for ground in grounds]
        pairs += [
            ("soft", "ground"),
            ("soft", "raised"),
            ("on-accent", "accent"),
            ("bad", "bad-ground"),
            ("bad", "ground"),
        ]
        assert {
            p: contrast(*(colours[c] for c in p)) for p in pairs if contrast(*(colours[c] for c in p)) < 4.5
        } == {}
        lines = [("edge", "ground"), ("accent", "ground"), *((f"{n}-line", "ground") for n in grounds[2:])]
        assert {
            p: contrast(*(colours[c] for c in p)) for p in lines if contrast(*(colours[c] for c in p)) < 3
        } == {}


def test_narrow_screens_need_no_sideways_scrolling(chromium, fake):
    with opened(chromium, fake.address, viewport={"width": 360, "height": 640}) as page:
        fake.script = lambda body: [
            *content("w" * 500, "\n```\n" + "x" * 200 + "\n```\n", "|a" * 40 + "|\n"),
            *end(),
        ]
        page.send("y" * 300)
        page.done()
        wide = (
            "document.documentElement.scrollWidth > 360 || document.querySelector('main').scrollWidth > 360"
        )
        assert not page.page.evaluate(wide)
        for selector in ("#input", "#send", "#toggle", "#new"):
            box = page.page.locator(selector).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= 360
        page.page.locator("#toggle").click()
        assert page.page.locator("#settings").bounding_box()["width"] == 360
        page.page.get_by_role("button", name="Close").click()
        assert page.page.locator("#settings").is_hidden()


def test_thousands_of_tokens_do_not_slow_it_down(page, fake):
    """The page is never busy for long, also with a line and a block of code that do not end."""
    words = ["word "] * 2000 + ["\n\n```\n"] + ["x = 1\n"] * 2000 + ["```\n"] + ["a **b** ", "c\n\n"] * 1000
    fake.script = lambda body: [*content(*words), *end()]
    page.page.evaluate(
        "window.longest = 0; new PerformanceObserver(l => l.getEntries().forEach("
        "e => window.longest = Math.max(window.longest, e.duration))).observe({type: 'longtask'})"
    )
    page.send("x")
    page.done()
    assert page.page.locator("#turns .token").count() == 3000
    assert page.page.evaluate("window.longest") < 1000
    assert (
        page.page.evaluate(
            "(m => m.scrollHeight - m.scrollTop - m.clientHeight)(document.querySelector('main'))"
        )
        < 2
    )


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    parts = [int(colour.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)
