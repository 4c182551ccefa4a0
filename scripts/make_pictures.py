# SPDX-License-Identifier: Apache-2.0
"""Make the pictures of the chat page anew: docs/pictures/chat*.png.

    python scripts/make_pictures.py [-o DIRECTORY]

It builds an engine of the demo checkpoint, serves it, and talks to it in the Chromium of the system, with Playwright's
Python package. What the pictures show is what the model wrote; figures of speed are those of the machine, whatever else
it does.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.engines.build import build_engine
from nemo_build.export.exporter import export_bundle

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SERVE = [sys.executable, "-c", "from nemo_build.cli import main; main()", "serve"]
LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up an object in the Python documentation.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "Full name of the object"}},
            "required": ["name"],
        },
    },
}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server with the demo checkpoint, which speculates with the MTP module."""
    bundle = export_bundle(CHECKPOINT, folder / "bundle", drafts=list(DRAFTERS.values())).out
    engine = build_engine(bundle, folder / "demo").out
    options = ["--port", "0", "--speculate", "mtp", "--draft-len", "3"]
    with subprocess.Popen([*SERVE, engine, *options], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if address := re.search(r"served at (\S+)", line):
                    yield address[1]
                    break
            else:
                raise SystemExit("the server does not start")
        finally:
            server.terminate()


@contextmanager
def opened(browser: Browser, address: str, width: int, height: int, scheme: str) -> Iterator[Page]:
    """The page, with settings that give the same texts each time."""
    size = {"width": width, "height": height}
    context = browser.new_context(color_scheme=scheme, viewport=size, device_scale_factor=1.25)
    page = context.new_page()
    page.goto(address)
    page.locator("#model", has_text="demo").wait_for()
    page.locator("#toggle").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens", exact=True).fill("300")
    yield page
    context.close()


def ask(page: Page, text: str) -> None:
    """Send a message and wait for the answer."""
    page.locator("#input").fill(text)
    page.locator("#input").press("Enter")
    done(page)


def done(page: Page) -> None:
    """Wait for the answer that comes."""
    page.locator("#stop").wait_for(state="hidden")
    page.locator(".answer.live").wait_for(state="detached")


def light(browser: Browser, address: str, path: Path) -> None:
    """An answer with its thinking, and the settings."""
    with opened(browser, address, 1200, 800, "light") as page:
        ask(page, "What can you do?")
        ask(page, "How do I open a file?")
        page.locator("summary").last.click()
        page.locator("#main").evaluate("main => { main.scrollTop = main.scrollHeight }")
        page.screenshot(path=path)


def dark(browser: Browser, address: str, path: Path) -> None:
    """A call of a tool, its result, and the answer."""
    with opened(browser, address, 1000, 800, "dark") as page:
        page.get_by_label("Tools").fill(json.dumps([LOOKUP], indent=2))
        page.locator("#toggle").click()
        ask(page, "Look up `os.path.join`.")
        page.get_by_label("Its result").fill("os.path.join(path, *paths): Join one or more path segments.")
        page.get_by_role("button", name="Send results").click()
        done(page)
        page.screenshot(path=path)


def phone(browser: Browser, address: str, path: Path) -> None:
    """A narrow screen."""
    with opened(browser, address, 360, 720, "light") as page:
        page.get_by_role("button", name="Close").click()
        ask(page, "How do I loop over a list?")
        page.screenshot(path=path)


def main() -> None:
    """Make all of them."""
    parser = argparse.ArgumentParser(description="Make the pictures of the chat page.")
    parser.add_argument("-o", "--out", type=Path, default=PICTURES)
    out: Path = parser.parse_args().out
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise SystemExit(f"There is none of {', '.join(BROWSERS)}.")
    out.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder)) as address,
        sync_playwright() as playwright,
    ):
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        light(browser, address, out / "chat.png")
        dark(browser, address, out / "chat-dark.png")
        phone(browser, address, out / "chat-phone.png")
        browser.close()


if __name__ == "__main__":
    main()
