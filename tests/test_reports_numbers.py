# SPDX-License-Identifier: Apache-2.0
"""Public bug reports of other runtimes about time steps, the convolution and long sequences, as behaviours of this one.

Reports whose behaviour is tested elsewhere:

- state-spaces/mamba#1015, rotations of drafters at large positions:
  ``test_draft_parity.test_rotation_at_large_positions``
- NVIDIA-NeMo/Nemotron#330, all spellings of a configuration: ``test_spec_spellings.test_spellings_are_equivalent``
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.engines.session import StepBatch
from nemo_build.plugins.registry import plugins_by_name
from nemo_build.runtime import Scheduling
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.prefix_cache import PrefixCache
from nemo_build.runtime.request import Request
from nemo_build.runtime.scheduler import Scheduler

from .op_models import EVERY_KERNEL, normal, run_function
from .tiny import feed, open_exported, reference_logits, reference_model, save_checkpoint
from .toy_session import ToyTable

BYTES = 1 << 28
ONE = SamplingParams(max_tokens=1, temperature=0)

# --- time steps and the convolution -----------------------------------------------------------------------------


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Mean KL of rows of logits, in nats."""
    a, b = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (p, q))
    return float((a.exp() * (a - b)).sum(-1).mean())


def reconfigure(source: Path, out: Path, **changes: Any) -> Path:
    """A copy of a checkpoint with another configuration; ``...`` removes a field."""
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text()) | changes
    (out / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return out


@pytest.fixture(scope="module")
def slow_model(tmp_path_factory) -> tuple[Any, Path]:
    """A model whose time steps are far below 0.001, the floor of initialisation, and its checkpoint."""
    model = reference_model(hybrid_override_pattern="MM*M")
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.mixer, "dt_bias"):
                layer.mixer.dt_bias.fill_(-9.0)
                layer.mixer.norm.weight.mul_(4)
    directory = tmp_path_factory.mktemp("slow") / "checkpoint"
    save_checkpoint(model, directory)
    return model, directory


LIMITS: dict[str, dict[str, Any]] = {
    "as the release writes it": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "as Python writes it": {"time_step_limit": [0.0, math.inf]},
    "by another name": {"time_step_limit": ..., "mamba_dt_limit": [0, "inf"]},
    "none": {"time_step_limit": ...},
}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
def test_time_steps_are_not_clamped_without_a_limit(slow_model, tmp_path, limit):
    """transformers#48989, mlx-lm#1026: the range of initialisation is no limit, in whatever way none is written."""
    model, checkpoint = slow_model
    changes = {**limit, "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 0.0001}
    session = open_exported(reconfigure(checkpoint, tmp_path / "c", **changes), tmp_path / "bundle")
    tokens = np.random.default_rng(0).integers(0, 96, 120).tolist()
    got = feed(session, {0: tokens[:100]}, past := {})[0]
    got = np.concatenate([got, *(feed(session, {0: [t]}, past)[0] for t in tokens[100:])])
    want = reference_logits(model, tokens)
    assert divergence(want, got) < 1e-9
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            assert tuple(layer.mixer.time_step_limit) == (0, math.inf)
            layer.mixer.time_step_limit = (0.001, 0.1)
    try:
        assert divergence(want, reference_logits(model, tokens)) > 1e-3, "a clamp would show"
    finally:
        for layer in model.model.layers:
            if hasattr(layer.mixer, "time_step_limit"):
                layer.mixer.time_step_limit = (0, math.inf)


SPELLINGS = {
    "conv_kernel": "mamba_d_conv",
    "n_groups": "mamba_num_groups",
    "ssm_state_size": "mamba_state_dim",
    "use_conv_bias": "mamba_conv_bias",
    "chunk_size": "mamba_chunk_size",
}


def test_the_convolution_has_its_channels_under_every_spelling(tmp_path):
    """NVIDIA-NeMo/Nemotron#330: x, B and C, not the hidden size times `expand`; kernel and groups by either name."""
    model = reference_model(hybrid_override_pattern="M*M", mamba_num_heads=4, conv_kernel=3, n_groups=2)
    save_checkpoint(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    renamed = {new: config[old] for old, new in SPELLINGS.items()} | dict.fromkeys(SPELLINGS, ...)
    reconfigure(tmp_path / "a", tmp_path / "b", **renamed, expand=9)
    tokens = np.random.default_rng(1).integers(0, 96, 30).tolist()
    for name in "ab":
        session = open_exported(tmp_path / name, tmp_path / f"{name}.bundle", pending=2)
        shapes = {s.name: s.shape for s in session.states if s.kind == "conv"}
        assert set(shapes.values()) == {("slots", "2+pending", 4 * 8 + 2 * 2 * 16)}
        past: dict[int, int] = {}
        got = np.concatenate([feed(session, {0: part}, past)[0] for part in (tokens[:17], tokens[17:])])
        np.testing.assert_allclose(got, reference_logits(model, tokens), atol=1e-4, rtol=0)
    a, b = (read_manifest(tmp_path / f"{n}.bundle", MODEL_BUNDLE)["spec"]["mamba"] for n in "ab")
    assert a == b


@pytest.mark.parametrize("kind", EVERY_KERNEL)
def test_large_time_steps_are_themselves(kind):
    """TensorRT-LLM#14652: softplus of a large number is that number, where its exponential overflows."""
    rng = np.random.default_rng(2)
    raw = np.array([-1e4, -200, -90, -20, 0, 15, 20, 30, 80, 88, 89, 100, 710, 1e4, 1e30], np.float32)
    steps, heads = len(raw), 2
    tokens = [normal(rng, 1, steps, heads), np.stack([raw, raw - 1], -1)[None]]
    tokens += [normal(rng, 1, steps, 3) for _ in range(2)]
    bias = np.array([0, 1], np.float32)
    parameters = [np.array([-60, 0.5], np.float32), normal(rng, heads), bias]
    state = np.zeros((1, heads, 1, 3), np.float32)
    ring = np.zeros((1, steps, heads + 3 + heads), np.float32)
    control = [np.array([0]), np.array([0]), np.array([0]), np.array([steps])]
    inputs = [*tokens, *parameters, state, ring, *control]
    y, _, pending = run_function("SelectiveScan", inputs, {}, instruction_set=kind)
    want = np.logaddexp(0, (tokens[1] + bias).astype(np.float64))
    np.testing.assert_allclose(pending[0, :, heads + 3 :], want[0], rtol=1e-6, atol=1e-30)
    x, b, c = tokens[0][0].astype(np.float64), tokens[2][0], tokens[3][0]
    h = np.zeros((heads, 3))
    for t in range(steps):
        h = h * np.exp(-np.exp(np.float64(parameters[0])) * want[0, t])[:, None]
        h += (want[0, t] * x[t])[:, None] * b[t]
        expected = h @ c[t] + parameters[1] * x[t]
        np.testing.assert_allclose(y[0, t], expected, rtol=1e-3, atol=1e-3 * np.abs(expected).max())


def test_a_model_with_large_time_steps_is_that_of_the_reference(tmp_path):
    """TensorRT-LLM#14652: the same in a model, in chunks and one by one."""
    model = reference_model(hybrid_override_pattern="M*M")
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer.mixer, "dt_bias"):
                layer.mixer.dt_bias.copy_(torch.tensor([150.0, 100.0, 90.0, 25.0, 1.0, -2.0]))
    save_checkpoint(model, tmp_path / "checkpoint")
    session = open_exported(tmp_path / "checkpoint", tmp_path / "bundle")
    tokens, past = np.random.default_rng(3).integers(0, 96, 60).tolist(), {}
    got = np.concatenate([feed(session, {0: tokens[a:b]}, past)[0] for a, b in ((0, 40), (40, 59), (59, 60))])
    want = reference_logits(model, tokens)
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max(), rtol=0)


# --- long sequences ---------------------------------------------------------------------------------------------

FAR = (1 << 16) + 8


def test_positions_beyond_two_to_the_sixteenth_are_positions_like_any_other(tmp_path):
    """state-spaces/mamba#1015: a chunk that starts at 65,536, then prompts that go on from cached states."""
    # States fade within some hundred tokens, so that the end of a text has a reference that is soon computed.
    model = reference_model(
        hybrid_override_pattern="M-M", hidden_size=16, mamba_num_heads=2, ssm_state_size=4
    )
    save_checkpoint(model, tmp_path / "checkpoint")
    session = open_exported(
        tmp_path / "checkpoint", tmp_path / "bundle", slots=1, context=FAR + 500, threads=1
    )
    scheduler = Scheduler(session, cache=PrefixCache(session.states, capacity=BYTES))
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 96, FAR + 340).tolist()
    step, seen = session.step, []

    def record(batch: StepBatch) -> Any:
        seen.append(step(batch))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "step", record)
        for length, cached in ((FAR, 0), (FAR + 300, FAR), (FAR + 340, FAR + 300)):
            request = Request(
                tokens[:length],
                ONE,
                eos_ids=(),
                table=ToyTable(),
                context=session.context,
                scheduling=Scheduling(prefill_chunk=512),
            )
            scheduler.add(request)
            while scheduler.unfinished:
                scheduler.step()
            assert request.cached_tokens == cached
            want = reference_logits(model, tokens[length - 2000 : length])[-1]
            np.testing.assert_allclose(seen[-1].logits[-1], want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("past", [(1 << 16) - 2, FAR])
def test_attention_reads_and_writes_beyond_two_to_the_sixteenth(past):
    """state-spaces/mamba#1015: the attention cache at, and far behind, a position of 65,536."""
    rng = np.random.default_rng(5)
    caches = [normal(rng, 2, 2, past + 8, 4) for _ in range(2)]
    tokens = [normal(rng, 2, 3, 4 * heads) for heads in (4, 2, 2)]
    lengths = np.array([3, 2])
    inputs = [*tokens, *caches, np.array([1, 0]), np.array([past, past + 5]), lengths]
    want = plugins_by_name()["CachedAttention"].reference(*inputs, scale=0.5)
    for kind in EVERY_KERNEL:
        got = run_function("CachedAttention", inputs, {"scale": 0.5}, instruction_set=kind)
        for row, n in enumerate(lengths):
            np.testing.assert_allclose(got[0][row, :n], want[0][row, :n], atol=1e-5, err_msg=kind)
        for cache in (1, 2):
            np.testing.assert_array_equal(got[cache], want[cache], err_msg=kind)
