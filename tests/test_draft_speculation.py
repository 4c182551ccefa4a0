# SPDX-License-Identifier: Apache-2.0
"""Block drafters in the runtime: their proposals against the references, and texts with them against plain decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_build.demo import CHECKPOINT
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.export.exporter import export_bundle
from nemo_build.runtime import Engine, SamplingParams, Scheduling
from nemo_build.runtime.speculation.base import Committed, DraftRequest
from nemo_build.runtime.speculation.drafting import greedy
from nemo_build.spec_draft import DraftSpec

from .draft_engine import open_drafter
from .draft_reference import CONFIGS, DraftReference, save_draft

DEMO = {
    "hidden_size": 192,
    "vocab_size": 3072,
    "mask_token_id": 2990,
    "pard_token": 2990,
    "target_layer_ids": [2, 8, 11],
    "eagle_aux_hidden_state_layer_ids": [3, 9, 12],
    "num_aux_layers": 3,
}
"""What the demo checkpoint asks of a drafter's configuration, at the top and in ``dflash_config``."""


def for_demo(config: dict) -> dict:
    """The configuration with what :data:`DEMO` says, wherever it says it."""
    changed = {k: DEMO.get(k, v) for k, v in config.items()}
    inner = changed.get("dflash_config")
    return changed | ({"dflash_config": {k: DEMO.get(k, v) for k, v in inner.items()}} if inner else {})


@pytest.fixture(scope="module", params=CONFIGS)
def opened(request, tmp_path_factory):
    """A reference, and the speculator of an engine with that drafter; float32 throughout."""
    return open_drafter(request.param, tmp_path_factory.mktemp("draft"), slots=3, context=64)


def expected(
    reference: DraftReference, spec: DraftSpec, taps: np.ndarray, anchor: int, count: int
) -> tuple[list[int], list[float]]:
    """Greedy drafts of the reference, and how confident it is."""
    from_anchor = spec.sample_from_anchor
    masks = [spec.mask_token_id] * (count - from_anchor)
    logits, hidden = reference.block(torch.from_numpy(taps), torch.tensor([anchor, *masks]))
    drafts: list[int] = []
    confidence: list[float] = []
    for i in range(count):
        row = logits[i + (not from_anchor)][None]
        if spec.markov_rank:
            previous = torch.tensor([drafts[-1] if drafts else anchor])
            row, likely = reference.markov(previous, row, hidden[i + (not from_anchor)][None])
            confidence += [] if likely is None else [float(likely)]
        drafts.append(int(row.argmax()))
    return drafts, confidence


def test_proposals_are_those_of_the_reference(opened):
    """Sequences at different places; some rounds in which nothing is asked of a sequence."""
    reference, speculator = opened
    rng = np.random.default_rng(0)
    width = len(reference.taps) * 48
    taps = {slot: np.empty((0, width), np.float32) for slot in range(3)}
    for slot in taps:
        speculator.start(slot, (), {})
    for length in (1, 3, 2, 1, 4):
        rows, newest = [], {}
        for slot in taps:
            n = int(rng.integers(1, 6))
            features = rng.standard_normal((n, width)).astype(np.float32) * 3
            tokens = rng.integers(0, 90, n + 1).tolist()
            rows.append(Committed(slot, len(taps[slot]), tokens, features))
            taps[slot] = np.concatenate([taps[slot], features])
            newest[slot] = tokens[-1]
        speculator.observe(rows)
        requests = [DraftRequest(slot, length, greedy) for slot in ([2, 0] if length % 2 else [0, 1, 2])]
        for request, proposal in zip(requests, speculator.propose(requests), strict=True):
            spec = speculator._spec
            count = min(length, spec.max_drafted or length)
            want, confidence = expected(reference, spec, taps[request.slot], newest[request.slot], count)
            assert proposal.tokens == want
            if spec.confidence:
                np.testing.assert_allclose(proposal.confidence, confidence, atol=1e-5)
            else:
                assert proposal.confidence is None


@pytest.fixture(scope="module")
def demo_with_drafters(tmp_path_factory) -> Path:
    """An engine of the demo checkpoint with random drafters of both kinds."""
    directory = tmp_path_factory.mktemp("demo")
    tables = load_file(CHECKPOINT / "model.safetensors")
    embeddings, head = (tables[n].float() for n in ("backbone.embeddings.weight", "lm_head.weight"))
    drafts = []
    for name in ("dflash", "dspark"):
        reference = DraftReference(for_demo(CONFIGS[name]), embeddings, head)
        save_draft(reference, directory / name, dtype=torch.bfloat16)
        drafts.append(directory / name)
    bundle = export_bundle(CHECKPOINT, directory / "bundle", drafts=drafts).out
    return build_engine(bundle, directory / "engine", options=BuildOptions(3, 512)).out


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_bad_drafts_change_nothing(demo_with_drafters, name):
    """A drafter that knows nothing: nearly all of its drafts are rejected."""
    plain = Engine.load(demo_with_drafters)
    text = Path(__file__).read_text()
    prompts = [text[i : i + n] for i, n in ((0, 90), (300, 7), (900, 400), (1500, 33))]
    for params in (SamplingParams(max_tokens=30, temperature=0), SamplingParams(max_tokens=30, seed=5)):
        want = plain.generate(prompts, params)
        for length in (1, 4, None):
            engine = Engine.load(demo_with_drafters, speculate=name, draft_length=length)
            assert engine.generate(prompts, params, scheduling=Scheduling(prefill_chunk=37)) == want
            assert length is None or engine.acceptance.steps > 0
