# SPDX-License-Identifier: Apache-2.0
"""Drafters lowered for GPUs compute what their portable graphs compute, and TensorRT-RTX builds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.tensorrt_rtx import LIBRARY
from nemo_build.engines.tensorrt_rtx.plan_file import summarize
from nemo_build.engines.trt.phases import DECODE, PREFILL
from nemo_build.export.exporter import export_bundle

from .draft_reference import CONFIGS, DraftReference, save_draft
from .draft_runner import DraftRunner
from .kernel_runner import KernelModel
from .lowered_pair import CLOSE
from .tensorrt_rtx_runner import LoweredGraph
from .tiny import reference_model, save_checkpoint

needs_package = pytest.mark.skipif(
    LIBRARY.installed_version() != LIBRARY.version, reason=f"tensorrt-rtx {LIBRARY.version} is not installed"
)

SLOTS, CONTEXT = 3, 96
PACKED = {"dflash": ("fc", "mlp"), "dspark": ("fc", "mlp", "markov_w2"), "dspark-odd": ()}


@pytest.fixture(scope="module", params=CONFIGS)
def drafter(request, tmp_path_factory) -> tuple[str, Path]:
    """A drafter's kind, and the bundle that it is in."""
    model = reference_model(hybrid_override_pattern="MEM*E*")
    directory = tmp_path_factory.mktemp("rtx-draft")
    save_checkpoint(model, directory / "checkpoint")
    tables = model.model.embeddings.weight.detach(), model.lm_head.weight.detach()
    reference = DraftReference(CONFIGS[request.param], *tables, seed=1)
    save_draft(reference, directory / "draft", packed=PACKED[request.param])
    bundle = export_bundle(directory / "checkpoint", directory / "bundle", drafts=[directory / "draft"]).out
    return request.param.removesuffix("-odd"), bundle


class Pair:
    """A drafter's lowered graphs and its portable ones over the same contexts, row i in slot i."""

    def __init__(self, bundle: Path, kind: str, lowered: Any = LoweredGraph) -> None:
        sizes = {"slots": SLOTS, "context": CONTEXT}
        self.portable = DraftRunner(bundle, kind, **sizes)
        self.context = lowered(bundle, f"{kind}_context", **sizes)
        self.block = lowered(bundle, kind, names=(DECODE,), **sizes)
        self.block.state = self.context.state
        has_markov = (bundle / f"{kind}_markov.onnx").is_file()
        self.markov = lowered(bundle, f"{kind}_markov", names=(DECODE,), **sizes) if has_markov else None
        self.width = self.context.width("taps")
        self.random = np.random.default_rng(0)
        self.past = np.zeros(SLOTS, np.int64)

    def extend(self, phase: str, lengths: list[int]) -> None:
        """Grow contexts, and compare what is in them."""
        taps = self.random.standard_normal((SLOTS, max(lengths), self.width)).astype(np.float32)
        given = {s: taps[s, :n] for s, n in enumerate(lengths) if n}
        past = dict(enumerate(self.past.tolist()))
        self.portable.extend(given, past)
        rows = {"lengths": np.array(lengths), "past": self.past}
        self.context.run(phase, {"taps": taps, **rows})
        self.past = np.array([past[s] for s in range(SLOTS)])
        for name, cache in self.portable.caches.items():
            for slot, n in enumerate(self.past):
                got, want = (c[slot, :, :n] for c in (self.context.state[name], cache))
                np.testing.assert_allclose(got, want, **CLOSE, err_msg=name)

    def draft(self, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Run blocks, and compare logits and hidden states; returns them."""
        tokens = [self.random.integers(3, 90, n).tolist() for n in lengths]
        past = dict(enumerate(self.past.tolist()))
        found = self.portable.draft({s: t for s, t in enumerate(tokens) if t}, past)
        ids = np.zeros((SLOTS, max(lengths)), np.int64)
        for row, row_tokens in zip(ids, tokens, strict=True):
            row[: len(row_tokens)] = row_tokens
        wanted = np.array([i * ids.shape[1] + t for i, n in enumerate(lengths) for t in range(n)])
        rows = {"lengths": np.array(lengths), "past": self.past, "accepted": np.zeros(SLOTS, np.int64)}
        got = self.block.run(DECODE, {"input_ids": ids, "logit_rows": wanted, **rows})
        logits = np.concatenate([found[s][0] for s in found])
        hidden = np.concatenate([found[s][1] for s in found])
        np.testing.assert_allclose(got["logits"], logits, **CLOSE)
        got_hidden = np.concatenate([got["hidden"][s, : lengths[s]] for s in found])
        np.testing.assert_allclose(got_hidden, hidden, **CLOSE)
        return logits, hidden


@pytest.mark.parametrize("lowered", [LoweredGraph, pytest.param(KernelModel, marks=pytest.mark.slow)])
def test_rounds_of_drafting(drafter, lowered):
    """Prompts, blocks of all lengths, contexts that grow by what was accepted, idle rows, windows left behind.

    In standard ops, and with kernels.
    """
    kind, bundle = drafter
    pair = Pair(bundle, kind, lowered)
    pair.draft([3, 1, 0])
    pair.extend(PREFILL, [20, 33, 1])
    pair.draft([8, 5, 3])
    pair.extend(DECODE, [3, 0, 8])
    logits, hidden = pair.draft([2, 0, 7])
    pair.extend(PREFILL, [0, 40, 2])
    pair.draft([8, 8, 8])
    if pair.markov is not None:
        previous = pair.random.integers(3, 90, len(logits))
        want = pair.portable.markov(previous, logits, hidden)
        got = pair.markov.run(
            DECODE, {"previous_ids": previous, "base_logits": logits, "hidden": hidden.astype(np.float32)}
        )
        for a, b in zip(got.values(), want, strict=True):
            np.testing.assert_allclose(a, b, **CLOSE)


def test_what_a_slot_held_before_does_not_matter(drafter):
    kind, bundle = drafter
    pair = Pair(bundle, kind)
    for cache in pair.context.state.values():
        # What Attention makes of a NaN beyond its lengths is the kernel's affair.
        cache[:] = 1e3 if kind == "dflash" else np.nan
    pair.extend(PREFILL, [5, 30, 2])
    pair.draft([8, 4, 0])


@needs_package
@pytest.mark.parametrize(
    "target", ["l40s", *(pytest.param(t, marks=pytest.mark.slow) for t in ("a100", "rtx-50"))]
)
def test_drafters_are_built(drafter, target, tmp_path):
    """The graphs of a drafter; prompts only extend contexts."""
    kind, bundle = drafter
    options = BuildOptions(max_sequences=2, max_context=64)
    engine = build_engine(bundle, tmp_path / "engine", target, options, use_cache=False).out
    graphs = read_manifest(engine, ENGINE_BUNDLE)["graphs"]
    wanted = {f"{name}.{phase}" for name in ("target", f"{kind}_context") for phase in (DECODE, PREFILL)}
    wanted |= {f"{kind}.{DECODE}"} | ({f"{kind}_markov.{DECODE}"} if kind == "dspark" else set())
    assert set(graphs) == wanted
    block, context = graphs[f"{kind}.{DECODE}"], graphs[f"{kind}_context.{PREFILL}"]
    assert block["state"] == context["state"], "they share their caches"
    if kind == "dflash":
        launched = summarize(engine / block["file"]).launches
        assert any("mha" in name for name in launched), "attention is a fused kernel"
