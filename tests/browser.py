# SPDX-License-Identifier: Apache-2.0
"""The browser of this machine, for tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of a Chromium, or ``None``."""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
"""It runs in containers, too, and as root."""


@contextmanager
def browser() -> Iterator[Browser]:
    """The machine's Chromium, driven by Playwright, which is not asked to download one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()
