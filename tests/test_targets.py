# SPDX-License-Identifier: Apache-2.0
"""The table of targets, and what its rules make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from nemo_build.cli import cli
from nemo_build.engines import targets
from nemo_build.engines.options import ACTIVATIONS, CONVERSIONS
from nemo_build.engines.targets import (
    BACKEND_RULES,
    TARGETS,
    Speculation,
    activation_formats,
    backends_of,
    default_speculation,
    default_weights,
    headroom,
    require_backend,
    speculators,
    state_types,
    usable_bytes,
    weight_formats,
)
from nemo_build.errors import UserError
from nemo_build.runtime.speculation.kinds import SPECULATORS
from nemo_build.state import ITEM_SIZE

GPUS = [t for t in TARGETS.values() if t.sm is not None]


def test_every_row_is_complete():
    for target in GPUS:
        assert target.memory_gb, target.name
        assert target.bandwidth_gbs, target.name
        assert target.source.startswith("NVIDIA"), target.name
        assert ("shared with the CPU" in target.note) == target.shared_memory, target.name
    assert TARGETS["cpu"].memory_gb is TARGETS["cpu"].sm is None


def test_every_target_has_backends_and_says_why_not():
    names = [rule.name for rule in BACKEND_RULES]
    assert len(set(names)) == len(names)
    for target in TARGETS.values():
        assert backends_of(target), target.name
    assert [r.name for r in backends_of(TARGETS["cpu"])] == ["onnxruntime"]
    on_rtx = {t.name for t in GPUS if "tensorrt-rtx" in [r.name for r in backends_of(t)]}
    assert on_rtx == {"a100", "l40s", "rtx-30", "rtx-40", "rtx-50", "rtx-pro-6000", "dgx-spark"}


def test_a_backend_is_found_or_refused_with_reasons(monkeypatch):
    assert require_backend("cpu").name == "onnxruntime"
    with pytest.raises(UserError, match="abacus") as caught:
        require_backend("abacus")
    assert len(caught.value.problems) == len(TARGETS)
    rules = tuple(replace(r, refusal="not yet" if r.sms is None else "") for r in BACKEND_RULES)
    monkeypatch.setattr(targets, "BACKEND_RULES", rules)
    with pytest.raises(UserError, match="h100") as caught:
        require_backend("h100")
    assert [p.split(":")[0] for p in caught.value.problems] == ["tensorrt", "onnxruntime-cuda"]
    assert "cpu" in caught.value.hint


def test_formats_follow_from_the_tensor_cores():
    for target in GPUS:
        assert ("nvfp4" in weight_formats(target)) == target.fp4
        assert ("fp8" in weight_formats(target)) == ("fp8" in activation_formats(target)) == target.fp8
        assert default_weights(target) == ("nvfp4" if target.fp4 else "int4")
    for target in TARGETS.values():
        assert default_weights(target) in CONVERSIONS
        assert set(state_types(target)) <= set(ITEM_SIZE)
    assert set(activation_formats(TARGETS["cpu"])) == set(ACTIVATIONS) - {"auto"}


def test_drafts_follow_from_memory_and_bandwidth():
    assert speculators(TARGETS["rtx-40"]) == (Speculation("mtp", 1),)
    assert speculators(TARGETS["dgx-spark"])[0] == Speculation("dspark", 3)
    assert speculators(TARGETS["dgx-spark"])[-1] == Speculation("mtp", 1)
    assert speculators(TARGETS["h100"])[-1] == Speculation("mtp", 3)
    for target in GPUS:
        assert {s.name for s in speculators(target)} <= set(SPECULATORS)
    assert default_speculation(TARGETS["h100"], ["mtp"]) == Speculation("mtp", 3)
    assert default_speculation(TARGETS["h100"], ["mtp", "dspark"]) == Speculation("dspark", 3)
    assert default_speculation(TARGETS["h100"], []) is None


def test_headroom():
    assert usable_bytes(TARGETS["h100"]) == int(80e9 * 0.92)
    assert headroom(TARGETS["dgx-spark"]) > headroom(TARGETS["h100"]) > headroom(TARGETS["cpu"]) == 0
    with pytest.raises(ValueError, match="cpu"):
        usable_bytes(TARGETS["cpu"])


def test_the_verb(tiny_bundle):
    def run(*arguments: object) -> str:
        words = ["targets", *map(str, arguments)]
        return CliRunner().invoke(cli, words, catch_exceptions=False).stdout

    rows = json.loads(run("--json"))
    assert [r["name"] for r in rows] == list(TARGETS)
    assert all(r["source"] for r in rows)
    text = run()
    assert all(t.product in text for t in TARGETS.values())
    fits = json.loads(run("--fits", tiny_bundle, "--json"))
    assert all(f["longest_context"] == 1024 for f in fits)
    assert "rtx-40" in run("--fits", tiny_bundle)


def test_support_page_names_every_target():
    page = (Path(__file__).parent.parent / "docs" / "support.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in TARGETS)
