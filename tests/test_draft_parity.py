# SPDX-License-Identifier: Apache-2.0
"""The drafters' graphs, in plain ONNX Runtime, against torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

from nemo_build.export.drafters import Rotation
from nemo_build.export.exporter import export_bundle
from nemo_build.export.graph import GraphBuilder
from nemo_build.export.models import GraphOptions
from nemo_build.plugins import native
from nemo_build.spec import load_spec
from nemo_build.spec_draft_config import build_draft

from .draft_reference import CONFIGS, DraftReference, save_draft
from .draft_runner import DraftRunner, open_session, states_of
from .tiny import reference_model, save_checkpoint

TOLERANCE = 1e-4
PACKED = {
    "dflash": ("fc", "mlp"),
    "dspark": ("fc", "mlp", "markov_w2"),
    "dspark-odd": (),
}
"""What the drafters' checkpoints store in NVFP4; the releases leave out attention and tables likewise."""

KERNELS = ["reference", "native"] if native.instruction_sets() else ["reference"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A random target and its checkpoint."""
    model = reference_model(hybrid_override_pattern="MEM*E*")
    directory = tmp_path_factory.mktemp("target") / "checkpoint"
    save_checkpoint(model, directory)
    return model, directory


def make_draft(model, directory: Path, name: str, **options) -> DraftReference:
    """A random drafter of a configuration, saved."""
    tables = model.model.embeddings.weight.detach(), model.lm_head.weight.detach()
    reference = DraftReference(CONFIGS[name], *tables, seed=len(name))
    save_draft(reference, directory, packed=PACKED[name], **options)
    return reference


@pytest.fixture(scope="module", params=CONFIGS)
def exported(request, target, tmp_path_factory):
    """A reference and the bundle of its checkpoint."""
    model, checkpoint = target
    directory = tmp_path_factory.mktemp("draft")
    reference = make_draft(model, directory / "draft", request.param)
    export_bundle(checkpoint, directory / "bundle", drafts=[directory / "draft"])
    return reference, directory / "bundle"


@pytest.fixture(params=KERNELS)
def runner(request, exported):
    """A reference and a runner of its graphs, in the reference functions or native kernels."""
    reference, bundle = exported
    with native.forced("reference" if request.param == "reference" else native.instruction_sets()[-1]):
        yield reference, DraftRunner(bundle, kind_of(reference))


def kind_of(reference: DraftReference) -> str:
    return "dflash" if "DFlash" in reference.config["architectures"][0] else "dspark"


def random_taps(rng: np.random.Generator, reference: DraftReference, n: int) -> np.ndarray:
    return rng.standard_normal((n, len(reference.taps) * 48)).astype(np.float32) * 3


def check(
    reference: DraftReference, taps: np.ndarray, block: list[int], got: tuple[np.ndarray, np.ndarray]
) -> None:
    """Compare a block's logits and hidden states, if it has any."""
    if not block:
        return
    want = reference.block(torch.from_numpy(taps), torch.tensor(block, dtype=torch.long))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 2, 7, 40])
def test_context_in_chunks_of_any_size(runner, chunk):
    reference, graphs = runner
    taps = random_taps(np.random.default_rng(0), reference, 40)
    past: dict[int, int] = {}
    for start in range(0, 40, chunk):
        graphs.extend({2: taps[start : start + chunk]}, past)
    block = [7, 90, 90, 90, 90]
    check(reference, taps, block, graphs.draft({2: block}, past)[2])


def test_first_block_without_context(runner):
    reference, graphs = runner
    block = [3, 90, 90]
    check(
        reference, random_taps(np.random.default_rng(0), reference, 0), block, graphs.draft({1: block}, {})[1]
    )


def test_rounds_of_several_rows(runner):
    """Rows of unequal lengths extend and draft, pause, accept anything from nothing to all, and draft again."""
    reference, graphs = runner
    rng = np.random.default_rng(1)
    taps = {slot: random_taps(rng, reference, 0) for slot in (0, 1, 3)}
    past: dict[int, int] = {}
    for step in range(12):
        slots = rng.permutation(list(taps)).tolist()
        if step:
            grown = {s: random_taps(rng, reference, int(rng.integers(0, 6))) for s in slots}
        else:
            grown = {s: random_taps(rng, reference, n) for s, n in zip(slots, (11, 1, 0), strict=True)}
        graphs.extend(grown, past)
        taps = {s: np.concatenate([taps[s], grown[s]]) for s in taps}
        lengths = rng.integers(0, 8, len(slots))
        blocks = {s: [int(rng.integers(90)), *[90] * 7][:n] for s, n in zip(slots, lengths, strict=True)}
        for slot, got in graphs.draft(blocks, past).items():
            check(reference, taps[slot], blocks[slot], got)
    assert max(past.values()) > 20


@pytest.mark.parametrize("accepted", [0, 1, 3, 6])
def test_a_block_leaves_no_trace(runner, accepted):
    """A longer block before, accepted to any part, changes nothing in the next; neither does one drafted twice."""
    reference, graphs = runner
    taps = random_taps(np.random.default_rng(2), reference, 20 + accepted)
    past: dict[int, int] = {}
    graphs.extend({1: taps[:20]}, past)
    graphs.draft({1: [5, *[90] * 7]}, past)
    if accepted:
        graphs.extend({1: taps[20:]}, past)
    block = [11, 90, 90, 90]
    first = graphs.draft({1: block}, past)[1]
    check(reference, taps, block, first)
    for a, b in zip(first, graphs.draft({1: block}, past)[1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_block_over_a_longer_past_is_as_after_going_back(runner):
    """A context that was extended too far is cut by a smaller `past`."""
    reference, graphs = runner
    taps = random_taps(np.random.default_rng(3), reference, 30)
    graphs.extend({0: taps}, {})
    check(reference, taps[:17], [1, 90, 90], graphs.draft({0: [1, 90, 90]}, {0: 17})[0])


def test_nan_of_another_sequence_stays_there(runner):
    reference, graphs = runner
    for cache in graphs.caches.values():
        cache[:] = np.nan
    taps = random_taps(np.random.default_rng(4), reference, 12)
    past: dict[int, int] = {}
    graphs.extend({3: taps, 0: taps[:0], 1: taps[:5]}, past)
    got = graphs.draft({3: [2, 90, 90, 90], 0: [], 1: [4, 90]}, past)
    check(reference, taps, [2, 90, 90, 90], got[3])
    check(reference, taps[:5], [4, 90], got[1])
    for cache in graphs.caches.values():
        assert np.isnan(cache[[0, 2]]).all()
        cache[:] = 0


def test_markov_head(runner):
    reference, graphs = runner
    if "markov_rank" not in reference.config:
        pytest.skip("this drafter has no Markov head")
    rng = np.random.default_rng(5)
    previous = rng.integers(0, 96, 5)
    base, hidden = (rng.standard_normal((5, n)).astype(np.float32) for n in (96, 48))
    want = reference.markov(*(torch.from_numpy(a) for a in (previous, base, hidden)))
    got = graphs.markov(previous, base, hidden)
    assert len(got) == 1 + ("enable_confidence_head" in reference.config)
    for g, w in zip(got, want, strict=False):
        np.testing.assert_allclose(g, w.numpy(), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("position", [0, 8_000])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_keys_are_turned_by_position(target, tmp_path, name, position):
    """Keys in the cache are turned as transformers' tables turn them, in float32, at any position."""
    reference = make_draft(target[0], tmp_path / "draft", name)
    export_bundle(target[1], tmp_path / "bundle", drafts=[tmp_path / "draft"])
    session = open_session(tmp_path / "bundle", f"{kind_of(reference)}_context")
    taps = random_taps(np.random.default_rng(6), reference, 4)
    sizes = {"slots": 1, "context": position + 8, "pending": 0}
    feeds = {s.name: np.zeros(s.resolve(sizes), np.float32) for s in states_of(session)}
    rows = {"lengths": [4], "past": [position], "slots": [0]}
    feeds |= {n: np.array(v, np.int64) for n, v in rows.items()} | {"taps": taps[None]}
    output = f"key.{kind_of(reference)}.layers.0.out"
    keys = session.run([output], feeds)[0][0, :, position : position + 4]

    context = reference.norm(torch.from_numpy(taps) @ reference.w["fc.weight"].T, "hidden_norm")
    k = (context @ reference.w["layers.0.self_attn.k_proj.weight"].T).view(
        4, -1, reference.config["head_dim"]
    )
    k = reference.norm(k, "layers.0.self_attn.k_norm")
    want = reference.rotate(k, torch.arange(position, position + 4)).transpose(0, 1)
    # The frequencies may differ in the last place of a float32, which the position multiplies.
    np.testing.assert_allclose(keys, want.numpy(), atol=1e-5 + 4 * position * 2.0**-24, rtol=0)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_rotation_at_large_positions(target, tmp_path, name):
    """Cosines and sines up to a position of a million: transformers' in float32, and how far both are from exact."""
    spec = build_draft(CONFIGS[name], load_spec(target[1]), "config.json")
    g = GraphBuilder("rotation", {}, lambda info: info.file)
    past, tokens = g.input("past", ("batch",)), g.input("tokens", ("batch", "steps"))
    rotation = Rotation.of(g, spec, past, tokens)
    for name_out, value in (("cos", rotation.cos), ("sin", rotation.sin)):
        g.output(value, name_out, ("batch", "steps", spec.head_dim // 2))
    session = ort.InferenceSession(ir.serde.serialize_model(g.finish({})).SerializeToString())
    starts = np.array([0, 1000, 8_192, 131_072, (1 << 20) - 100])
    got = session.run(None, {"past": starts, "tokens": np.zeros((5, 100), np.int64)})

    positions = starts[:, None] + np.arange(100)
    theirs = DraftReference(CONFIGS[name], *[torch.zeros(96, 48)] * 2).rotary(
        torch.zeros(1), torch.from_numpy(positions)
    )
    angles = positions[..., None] * np.array(spec.rotary.frequencies())
    bound = 1e-6 + positions[..., None] * 2.0**-23
    for ours, reference, exact in zip(got, theirs, (np.cos(angles), np.sin(angles)), strict=True):
        assert (np.abs(ours - reference[..., : spec.head_dim // 2].numpy()) < bound).all()
        assert (np.abs(ours / spec.rotary.attention_factor - exact) < bound).all()


@pytest.mark.parametrize("last_tap", ["raw", "normed"])
def test_taps_of_the_target(target, tmp_path, last_tap):
    """The residual after each layer, in list order; of two drafters with other lists, all that either needs."""
    model, checkpoint = target
    for name in ("dflash", "dspark-odd"):
        make_draft(model, tmp_path / name, name)
    drafts = [tmp_path / "dflash", tmp_path / "dspark-odd"]
    export_bundle(checkpoint, tmp_path / "bundle", drafts=drafts, options=GraphOptions(last_tap=last_tap))
    tokens = np.random.default_rng(7).integers(0, 96, 23)
    want = tapped(model, tokens, [1, 3, 5, 4, 0], last_tap)
    got = target_taps(tmp_path / "bundle", tokens)
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def tapped(model, tokens: np.ndarray, layers: list[int], last_tap: str) -> np.ndarray:
    """Outputs of transformers' layers ``[L, n*H]``."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(i: int):
        return lambda _, __, out: outputs.__setitem__(i, (out[0] if isinstance(out, tuple) else out)[0])

    hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        last = model.model(torch.from_numpy(tokens)[None], use_cache=False).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    if last_tap == "normed":
        outputs[len(model.model.layers) - 1] = last
    return torch.cat([outputs[i] for i in layers], dim=-1).numpy()


def target_taps(bundle: Path, tokens: np.ndarray) -> np.ndarray:
    """The target graph's taps of one sequence."""
    session = open_session(bundle, "target")
    sizes = {"slots": 1, "context": 64, "pending": 0}
    feeds = {s.name: np.zeros(s.resolve(sizes), np.float32) for s in states_of(session)}
    rows = {"lengths": [len(tokens)], "past": [0], "accepted": [0], "slots": [0], "logit_rows": [0]}
    feeds |= {n: np.array(v, np.int64) for n, v in rows.items()} | {"input_ids": tokens[None]}
    return session.run(["taps"], feeds)[0][0]


def test_two_drafters_beside_one_target(target, tmp_path):
    """From tokens to drafts: the target's taps go to both drafters, whose lists of layers differ."""
    model, checkpoint = target
    references = {}
    for name in ("dspark-odd", "dflash"):
        references[name] = make_draft(model, tmp_path / name, name, dtype=torch.bfloat16)
    export_bundle(checkpoint, tmp_path / "bundle", drafts=[tmp_path / n for n in references])
    tokens = np.random.default_rng(8).integers(0, 96, 30)
    taps = target_taps(tmp_path / "bundle", tokens)
    for reference in references.values():
        graphs, past = DraftRunner(tmp_path / "bundle", kind_of(reference)), {}
        graphs.extend({0: taps[:21]}, past)
        graphs.extend({0: taps[21:]}, past)
        block = [9, 90, 90, 90]
        check(
            reference, tapped(model, tokens, reference.taps, "raw"), block, graphs.draft({0: block}, past)[0]
        )
