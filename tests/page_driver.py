# SPDX-License-Identifier: Apache-2.0
"""The chat page, open in a browser."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Request


class Page:
    """A page that is open.

    Attributes:
        page: Playwright's.
        context: The browser's context that it is in.
        problems: What went wrong in it: errors, warnings, dialogs, requests to others.
    """

    def __init__(self, chromium: Browser, address: str, **context: Any) -> None:
        self.context = chromium.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.problems: list[str] = []
        self.address = address
        self.page.on("console", lambda m: m.type in ("error", "warning") and self.problems.append(m.text))
        self.page.on("pageerror", lambda e: self.problems.append(str(e)))
        self.page.on("dialog", lambda d: self.problems.append(f"dialog {d.message}"))
        self.page.on("request", self.asked)
        self.page.goto(address)

    def asked(self, request: Request) -> None:
        """It asks its own server only."""
        if not request.url.startswith(self.address):
            self.problems.append(f"request to {request.url}")

    def send(self, text: str) -> None:
        """Type a message and send it by the keyboard."""
        self.page.locator("#input").fill(text)
        self.page.keyboard.press("Enter")

    def done(self) -> None:
        """Wait for the answer that comes."""
        self.page.locator("#stop").wait_for(state="hidden")
        self.page.locator(".answer.live").wait_for(state="detached")

    def text(self, selector: str) -> str:
        """Text of the last of some elements."""
        return self.page.locator(selector).last.inner_text()


@contextmanager
def opened(chromium: Browser, address: str, **context: Any) -> Iterator[Page]:
    """The page at an address. In the end nothing may have gone wrong in it."""
    page = Page(chromium, address, **context)
    yield page
    page.context.close()
    assert page.problems == []


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something to hold."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
