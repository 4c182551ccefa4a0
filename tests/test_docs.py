# SPDX-License-Identifier: Apache-2.0
"""Pages hold together: generated ones are up to date, links lead somewhere, the index has all, pictures are small."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import jsonschema
import pytest
import yaml

from .docs_pages import PAGES, ROOT, anchors, blocks, links, name_of, option_problems

SCRIPT = ROOT / "scripts" / "make_docs.py"
PICTURES = ROOT / "docs" / "pictures"


def test_generated_pages_are_up_to_date():
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    """Files exist, and so do headings of pages; other hosts are not asked."""
    broken = []
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            broken.append(f"{link}: no such file")
        elif anchor and (target.suffix != ".md" or anchor not in anchors(target)):
            broken.append(f"{link}: no such heading")
    assert not broken


def test_the_index_has_every_page():
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link.split("#")[0]).resolve() for link in links(index)}
    missing = [name_of(p) for p in PAGES if p != index and p not in listed]
    assert not missing


def test_pictures_are_small_and_used():
    """Below 200 KB each and 2 MB together, and every one is in a page."""
    pictures = [p for p in PICTURES.iterdir() if p.is_file()]
    large = {p.name: p.stat().st_size for p in pictures if p.stat().st_size > 200_000}
    assert not large
    assert sum(p.stat().st_size for p in pictures) < 2_000_000
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page)}
    unused = [p.name for p in pictures if p not in shown]
    assert not unused


def test_the_tour_can_be_made_again():
    """The script's commands have verbs and options that there are, and it makes what the tour shows."""
    script = (ROOT / "scripts" / "make_tour_pictures.py").read_text(encoding="utf-8")
    commands = re.findall(r'"(nemo-build [^{"]+)"', script)
    assert len(commands) > 10
    assert not [p for c in commands for p in option_problems(c, "make_tour_pictures.py")]
    made = set(re.findall(r'^    "([\w-]+\.(?:svg|png))":', script, re.MULTILINE))
    shown = {
        link.removeprefix("pictures/") for link in links(ROOT / "docs" / "tour.md") if "pictures/" in link
    }
    assert made == {name for name in shown if not name.startswith("chat")}


def test_pictures_load_nothing():
    """They are shown by hosts that fetch nothing for them, and must not try."""
    for picture in PICTURES.glob("*.svg"):
        text = picture.read_text(encoding="utf-8")
        assert set(re.findall(r'https?://[^"\s<)]+', text)) <= {"http://www.w3.org/2000/svg"}, picture.name
        assert "<script" not in text


@pytest.mark.parametrize(
    "block", [b for b in blocks() if b.language in ("yaml", "json")], ids=lambda b: b.place
)
def test_data_in_pages_can_be_read(block):
    """YAML as one document; JSON as one, or as lines of it."""
    if block.language == "yaml":
        assert yaml.safe_load(block.text)
        return
    try:
        json.loads(block.text)
    except json.JSONDecodeError:
        for line in block.text.splitlines():
            json.loads(line)


def test_the_values_in_the_deployment_page_fit_the_chart():
    schema = json.loads((ROOT / "deploy/helm/nemo-build/values.schema.json").read_text(encoding="utf-8"))
    values = [b for b in blocks() if b.page == "docs/deploy.md" and b.language == "yaml"]
    for block in values:
        given = yaml.safe_load(block.text.replace("sha256:...", f"sha256:{'0' * 64}"))
        defaults = yaml.safe_load((ROOT / "deploy/helm/nemo-build/values.yaml").read_text(encoding="utf-8"))
        jsonschema.validate({**defaults, **given}, schema)
