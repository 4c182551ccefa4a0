# SPDX-License-Identifier: Apache-2.0
"""Every fault of the catalogue is found by the check that should, with its cause; rebuilds raise no alarm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.check.checks import speed
from nemo_build.engines.check.run import check, measure, open_baseline
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.suite import Suite
from nemo_build.engines.check.verdict import Status, Verdict
from nemo_build.export.exporter import export_bundle

from .faults import FAULTS, Clock, Fault, copy_engine

SUITE = """
checks:
  provenance: {}
  structure: {}
  size: {}
  memory: {tokens: 32, output: 4}
  numerics: {sequences: 5, tokens: 64}
  behaviour: {sequences: 3, tokens: 40, output: 20, drafts: 3}
  acceptance: {sequences: 8, tokens: 48, output: 48, drafts: 3}
  quality: {documents: 12, tokens: 96}
  speed: {batches: [1], contexts: [32], loads: 1, first_tokens: 9, steps: 5}
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Suite:
    path = tmp_path_factory.mktemp("suite") / "suite.yaml"
    path.write_text(SUITE)
    return Suite.load(path)


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("engines")
    export_bundle(CHECKPOINT, folder / "bundle", drafts=list(DRAFTERS.values()))
    return {
        weights: build_engine(
            folder / "bundle",
            folder / weights,
            options=BuildOptions(4, 1024, weights=weights),
            use_cache=False,
        ).out
        for weights in ("packed", "int4")
    }


@pytest.fixture(scope="module")
def baselines(engines, suite, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("baselines")
    for path in engines.values():
        subject = Subject(path)
        open_baseline(folder, subject).write(measure(subject, suite).data, subject.facts, "first")
    return folder


def run(engine: Path, suite: Suite, baselines: Path, *names: str, before: Path | None = None) -> Verdict:
    subject = Subject(engine, before=before)
    return check(subject, suite.only(names) if names else suite, open_baseline(baselines, subject))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["packed", "int4"])
def test_no_fault(weights, engines, suite, baselines):
    names = [p.name for p in suite.checks if p.name != "speed"]
    verdict = run(engines[weights], suite, baselines, *names)
    assert verdict.status is Status.PASS, [(r.check, r.headline) for r in verdict.results]


@pytest.mark.slow
def test_noise_is_no_fault(engines, suite, baselines, tmp_path, monkeypatch):
    again = copy_engine(engines["packed"], tmp_path / "engine")
    Clock().install(monkeypatch)
    verdict = run(again, suite, baselines, "speed", before=engines["packed"])
    assert verdict.status is Status.PASS, [(r.check, r.headline) for r in verdict.results]


@pytest.mark.slow
def test_what_is_slower_once_only(engines, suite, baselines, tmp_path, monkeypatch):
    """Whatever made an engine slower while it was timed, it counts only if it does so again."""
    again = copy_engine(engines["packed"], tmp_path / "engine")
    clock = Clock(again)
    clock.install(monkeypatch)
    timed = speed._timed

    def once(*arguments: Any) -> Any:
        found = timed(*arguments)
        clock.slow = None
        return found

    monkeypatch.setattr(speed, "_timed", once)
    verdict = run(again, suite, baselines, "speed", before=engines["packed"])
    assert verdict.status is Status.PASS, [(r.check, r.headline) for r in verdict.results]
    notes = [f.note for f in verdict.results[0].figures]
    assert any("timed again with engines loaded anew" in note for note in notes), notes


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.name)
def test_fault_is_found(fault: Fault, engines, suite, baselines, tmp_path, monkeypatch):
    good = engines[fault.weights]
    engine = copy_engine(good, tmp_path / "engine")
    fault.make(engine, monkeypatch)
    verdict = run(
        engine, suite, baselines, "structure", fault.check, before=good if fault.check == "speed" else None
    )
    result = next(r for r in verdict.results if r.check == fault.check)
    told = [(f.name, f.value, f.note) for f in result.figures if f.status is not Status.PASS]
    assert result.status == fault.status, (result.headline, told)
    assert any(fault.cause in cause for cause in result.causes[:3]), result.causes
    assert verdict.exit_code == (2 if fault.status == "broken" else 1)


def test_catalogue():
    assert len(FAULTS) == 28  # as the README says
    assert {f.check for f in FAULTS} == {p.name for p in Suite.load().checks}
