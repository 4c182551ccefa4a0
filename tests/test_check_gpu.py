# SPDX-License-Identifier: Apache-2.0
"""``nemo-build check`` of engines whose graphs cannot be looked into, on a device of the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nemo_build.engines import backends
from nemo_build.engines.check.checks import numerics
from nemo_build.engines.check.plain import plain
from nemo_build.engines.check.prompts import token_sequences
from nemo_build.engines.check.returned import returned
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.trace import relative_error, trace
from nemo_build.engines.check.verdict import Status
from nemo_build.engines.gpu.session import GpuSession
from nemo_build.runtime.engine import Engine

from .fake_cuda import HostEngine

SETTINGS = numerics.Settings(sequences=2, tokens=40)
LAYERS = (2, 8, 11)


@pytest.fixture(scope="module")
def engine(demo_engine_directory, tmp_path_factory) -> HostEngine:
    out = tmp_path_factory.mktemp("gpu") / "engine"
    return HostEngine(demo_engine_directory.parent / "bundle", out, context=256)


@pytest.fixture
def subject(engine, monkeypatch) -> Subject:
    monkeypatch.setitem(backends.BACKENDS, "host", engine.backend())
    return Subject(engine.directory)


def test_layers_that_drafters_are_fed(subject, demo_engine_directory):
    """They are those of the CPU's graph, in which all can be seen."""
    (tokens,) = token_sequences(Engine.load(demo_engine_directory), 1, 100)
    found = returned(subject, tokens)
    names = {f"layers up to {n}": f"backbone.layers.{n}/residual" for n in LAYERS} | {"hidden": "hidden"}
    assert list(found) == list(names)
    want = trace(demo_engine_directory, tokens, only=set(names.values())).values
    for name, value in found.items():
        assert relative_error(want[names[name]][0], value) < 1e-3, name


def test_the_error_is_told_to_the_layers_that_are_known(subject, monkeypatch):
    before = plain(numerics.measure(subject, SETTINGS))
    assert list(before["layers"]) == [*(f"layers up to {n}" for n in LAYERS), "hidden"]
    good = numerics.judge(plain(numerics.measure(subject, SETTINGS)), before, SETTINGS)
    assert {f.status for f in good.figures} == {Status.PASS}
    step = GpuSession.step

    def wrong(session, batch):
        found = step(session, batch)
        if found.taps is not None:
            width = found.taps.shape[-1] // len(LAYERS)
            found.taps[..., width:] *= np.float32(1.1)
        return dataclasses.replace(found, logits=found.logits * np.float32(1.1))

    monkeypatch.setattr(GpuSession, "step", wrong)
    bad = numerics.judge(plain(numerics.measure(subject, SETTINGS)), before, SETTINGS)
    assert next(f for f in bad.figures if f.name == "layers").status is Status.REGRESS
    assert bad.causes[0].startswith("the error begins at layers up to 8 ")
