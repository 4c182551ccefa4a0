# SPDX-License-Identifier: Apache-2.0
"""The exported step graph, in plain ONNX Runtime, against transformers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.plugins import native

from .mtp_reference import save_with_mtp
from .tiny import (
    KINDS,
    feed,
    fix_time_step_clamp,
    open_exported,
    reference_logits,
    reference_model,
    save_checkpoint,
)

TOLERANCE = 1e-4


@pytest.fixture(
    scope="module", params=[(kind, kernels) for kind in KINDS for kernels in ("reference", "native")]
)
def pair(request, tmp_path_factory):
    """A reference model and the session of its exported checkpoint, in the reference functions or native kernels."""
    kind, kernels = request.param
    model = reference_model(**KINDS[kind])
    directory = tmp_path_factory.mktemp("tiny")
    save_checkpoint(model, directory / "checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "NEMO_BUILD_ISA", "reference" if kernels == "reference" else native.instruction_sets()[-1]
        )
        return model, open_exported(directory / "checkpoint", directory / "bundle")


def tokens_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 96, n).tolist()


def test_one_shot_prefill(pair):
    model, session = pair
    tokens = tokens_of(129)
    got = feed(session, {2: tokens}, {})[2]
    np.testing.assert_allclose(got, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [1, 127, 128, 129, 300])
def test_chunked_prefill(pair, chunk):
    model, session = pair
    tokens = tokens_of(40 if chunk == 1 else 310)
    past: dict[int, int] = {}
    got = np.concatenate(
        [feed(session, {1: tokens[i : i + chunk]}, past)[1] for i in range(0, len(tokens), chunk)]
    )
    np.testing.assert_allclose(got, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)


def test_batch_of_unequal_lengths_then_mixed_decode(pair):
    """Prompts of unequal lengths, then steps in which some rows prefill, some decode and some pause."""
    model, session = pair
    rng = np.random.default_rng(3)
    texts = {0: tokens_of(60, 1), 3: tokens_of(45, 2), 1: tokens_of(33, 3)}
    got: dict[int, list[np.ndarray]] = {slot: [] for slot in texts}
    past: dict[int, int] = {}
    first = {0: 17, 3: 1, 1: 30}
    while any(past.get(s, 0) < len(t) for s, t in texts.items()):
        rows = {}
        for slot in rng.permutation(list(texts)):
            done = past.get(slot, 0)
            n = first[slot] if not done else int(rng.integers(0, 4))
            rows[int(slot)] = texts[slot][done : done + n]
        if not any(rows.values()):
            continue
        for slot, logits in feed(session, rows, past).items():
            got[slot].append(logits)
    for slot, tokens in texts.items():
        np.testing.assert_allclose(
            np.concatenate(got[slot]), reference_logits(model, tokens), atol=TOLERANCE, rtol=0
        )


@pytest.mark.skipif(native.library() is None, reason="the reference functions do not keep the order of sums")
@pytest.mark.parametrize("top_k", [2, 3, 5, 6, 7])
def test_no_bit_depends_on_what_else_is_in_a_step(tmp_path, top_k):
    """Not even by where in memory a token's numbers lie, which decides in which order a library may add a few."""
    model = reference_model(
        hybrid_override_pattern="MEM*E-", num_experts_per_tok=top_k, n_routed_experts=16, hidden_size=64
    )
    model.save_pretrained(tmp_path / "checkpoint")
    session = open_exported(tmp_path / "checkpoint", tmp_path / "bundle")
    tokens, other = tokens_of(240, top_k), tokens_of(240, 99)
    want = np.concatenate([feed(session, {0: [t]}, {0: i})[0] for i, t in enumerate(tokens)])
    for width in (2, 3, 4, 7, 60):
        past: dict[int, int] = {}
        got = [
            feed(session, {1: other[i : i + width], 0: tokens[i : i + width]}, past)[0]
            for i in range(0, len(tokens), width)
        ]
        np.testing.assert_array_equal(np.concatenate(got), want)


def test_reused_slot_starts_afresh(pair):
    model, session = pair
    tokens = tokens_of(20, 5)
    feed(session, {0: tokens_of(50, 6)}, {})
    np.testing.assert_allclose(
        feed(session, {0: tokens}, {})[0], reference_logits(model, tokens), atol=TOLERANCE, rtol=0
    )


def test_state_is_updated_in_place(pair):
    """A step writes the session's own buffers, and only the slots of its active rows."""
    _, session = pair
    feed(session, {0: tokens_of(9), 1: tokens_of(5)}, {})
    before = {name: a.copy() for name, a in session.state().items()}
    feed(session, {1: tokens_of(4)}, {1: 5})
    for name, after in session.state().items():
        np.testing.assert_array_equal(after[[0, 2, 3]], before[name][[0, 2, 3]])
        assert not after.size or not np.array_equal(after[1], before[name][1])


@pytest.mark.parametrize("accepted", [0, 1, 3, 4])
def test_rejected_tokens_leave_no_trace(tmp_path, accepted):
    """Verify four drafts, keep some, go on: the logits are those of a sequence without the rejected ones."""
    model = reference_model(**KINDS["hybrid"])
    model.save_pretrained(tmp_path / "checkpoint")
    session = open_exported(tmp_path / "checkpoint", tmp_path / "bundle", pending=5)
    prompt, drafts, after = tokens_of(30), tokens_of(4, 8), tokens_of(7, 9)
    other = tokens_of(25, 10)
    feed(session, {2: prompt, 0: other[:12]}, past := {})
    feed(session, {2: drafts, 0: other[12:15]}, past, accepted=[0, 0])
    past[2] -= 4 - accepted
    got = feed(session, {2: after[:3], 0: other[15:]}, past, accepted=[accepted, 3])
    kept = prompt + drafts[:accepted] + after
    want = reference_logits(model, kept)
    start = len(prompt) + accepted
    np.testing.assert_allclose(got[2], want[start : start + 3], atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got[0], reference_logits(model, other)[15:], atol=TOLERANCE, rtol=0)
    rest = feed(session, {2: after[3:]}, past, accepted=[3])[2]
    np.testing.assert_allclose(rest, want[start + 3 :], atol=TOLERANCE, rtol=0)


def test_mtp_module(tmp_path):
    """The second graph: hidden states in, logits and hidden states out, in chunks."""
    model, mtp = save_with_mtp(tmp_path / "checkpoint", **KINDS["hybrid"])
    target = open_exported(tmp_path / "checkpoint", tmp_path / "bundle", hidden=True)
    session = OrtSession(tmp_path / "bundle" / "mtp.onnx", slots=2, context=64, hidden=True)
    tokens = tokens_of(40)
    step = StepBatch.of_rows([tokens], past=[0], slots=[1], logits="all")
    hidden = target.step(step).hidden
    with torch.no_grad():
        trunk_hidden = model.model(torch.tensor([tokens])).last_hidden_state[0]
    np.testing.assert_allclose(hidden[0], trunk_hidden.numpy(), atol=TOLERANCE, rtol=0)
    want_logits, want_hidden = mtp(torch.tensor(tokens[1:]), trunk_hidden[:-1])
    for start, end in ((0, 17), (17, 18), (18, 39)):
        batch = StepBatch.of_rows([tokens[1 + start : 1 + end]], past=[start], slots=[0], logits="all")
        out = session.step(replace(batch, hidden_in=hidden[:, start:end]))
        np.testing.assert_allclose(out.logits, want_logits[start:end].numpy(), atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(out.hidden[0], want_hidden[start:end].numpy(), atol=TOLERANCE, rtol=0)


def test_float16_checkpoint(tmp_path):
    """An F16 checkpoint computed in float32 is the reference in float32 with the same weights."""
    model = reference_model(dtype=torch.float16, **KINDS["hybrid"])
    model.save_pretrained(tmp_path / "checkpoint")
    session = open_exported(tmp_path / "checkpoint", tmp_path / "bundle")
    tokens = tokens_of(50)
    model.float()
    np.testing.assert_allclose(
        feed(session, {0: tokens}, {})[0], reference_logits(model, tokens), atol=TOLERANCE, rtol=0
    )


def test_nan_of_another_sequence_stays_there(pair):
    """Slots full of NaN, left behind or in a paused row, reach neither a new sequence nor a running one."""
    model, session = pair
    tokens = tokens_of(30, 11)
    past: dict[int, int] = {}
    first = feed(session, {0: tokens[:20]}, past)[0]
    for name, buffer in session.state().items():
        buffer[1:] = np.nan
        if name.startswith(("key", "value")):
            buffer[0, :, 20:] = np.nan
    rows = {0: tokens[20:], 1: tokens[:7], 2: []}
    got = feed(session, rows, {**past, 2: 12})
    want = reference_logits(model, tokens)
    np.testing.assert_allclose(np.concatenate([first, got[0]]), want, atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(got[1], want[:7], atol=TOLERANCE, rtol=0)
    for buffer in session.state().values():
        buffer[:] = 0


WRONG_STEPS = {
    "slot out of range": {"slots": [9]},
    "negative token": {"input_ids": [[-1, 2]]},
    "token out of range": {"input_ids": [[1, 96]]},
    "length beyond the columns": {"lengths": [3]},
    "past the context": {"past": [511]},
    "more accepted than pending": {"accepted": [1], "past": [4]},
    "logit row out of range": {"logit_rows": [2]},
    "wrong shape": {"past": [0, 0]},
    "no rows": {
        n: np.zeros((0, 2) if n == "input_ids" else 0) for n in ("input_ids", "lengths", "past", "slots")
    },
}


@pytest.mark.parametrize("wrong", WRONG_STEPS.values(), ids=WRONG_STEPS)
def test_wrong_steps_are_refused(tiny_bundle, wrong):
    session = OrtSession(tiny_bundle / "target.onnx", slots=4, context=512)
    batch = StepBatch.of_rows([[1, 2]], past=[0], slots=[0])
    wrong = {name: np.array(value, np.int64) for name, value in wrong.items()}
    with pytest.raises(ValueError, match=r"\w"):
        session.step(replace(batch, **wrong))
    shared = StepBatch.of_rows([[1], [2]], past=[0, 0], slots=[3, 3])
    with pytest.raises(ValueError, match="share a state slot"):
        session.step(shared)


@pytest.mark.parametrize("kind", ["hybrid", "latent-experts"])
def test_bfloat16_checkpoint(tmp_path, kind):
    """A BF16 checkpoint computed in float32 agrees with the reference in bfloat16 as far as that goes.

    Rounding moves a few tokens to another expert, so quantiles and the most likely token are judged.
    """
    model = reference_model(dtype=torch.bfloat16, **KINDS[kind])
    for layer in model.model.layers:
        if hasattr(layer.mixer, "gate"):
            layer.mixer.gate.float()  # as transformers keeps it when it loads a BF16 checkpoint
    model.save_pretrained(tmp_path / "checkpoint")
    session = open_exported(tmp_path / "checkpoint", tmp_path / "bundle")
    tokens = tokens_of(400)
    want = reference_logits(model, tokens)
    got = feed(session, {0: tokens}, {})[0]
    error = np.linalg.norm(got - want, axis=-1) / np.linalg.norm(want, axis=-1)
    assert np.quantile(error, 0.5) < 0.03
    assert np.quantile(error, 0.9) < 0.15
    assert (got.argmax(-1) == want.argmax(-1)).mean() > 0.9
    exact = reference_model(dtype=torch.bfloat16, **KINDS[kind]).float()
    fix_time_step_clamp(exact)
    np.testing.assert_allclose(got, reference_logits(exact, tokens), atol=TOLERANCE, rtol=0)


@st.composite
def random_config(draw):
    """A small configuration: any pattern, any widths that divide."""
    groups, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    experts_per_group, expert_groups = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    top_groups = draw(st.integers(1, expert_groups))
    return {
        # Transformers needs an attention layer for its cache and a first layer of any kind.
        "hybrid_override_pattern": draw(st.text("M*E-", min_size=1, max_size=5)) + "*",
        "hidden_size": draw(st.integers(1, 7)) * 8,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([4, 8, 12])),
        "mamba_num_heads": groups * draw(st.integers(1, 3)),
        "mamba_head_dim": draw(st.integers(1, 9)),
        "n_groups": groups,
        "ssm_state_size": draw(st.integers(1, 17)),
        "conv_kernel": draw(st.integers(2, 5)),
        "use_conv_bias": draw(st.booleans()),
        "chunk_size": draw(st.sampled_from([8, 16, 64])),
        "n_routed_experts": experts_per_group * expert_groups,
        "n_group": expert_groups,
        "topk_group": top_groups,
        "num_experts_per_tok": draw(st.integers(1, experts_per_group * top_groups)),
        "norm_topk_prob": draw(st.booleans()),
        "moe_latent_size": draw(st.sampled_from([None, 16])),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "time_step_limit": draw(st.sampled_from([(0.0, float("inf")), (0.01, 0.3)])),
    }


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=random_config(), seed=st.integers(0, 99), cut=st.integers(1, 69))
def test_random_configurations(tmp_path_factory, config, seed, cut):
    directory = tmp_path_factory.mktemp("random")
    model = reference_model(seed, **config)
    save_checkpoint(model, directory / "checkpoint")
    session = open_exported(directory / "checkpoint", directory / "bundle", slots=1, context=70)
    tokens = tokens_of(70, seed)
    past: dict[int, int] = {}
    got = np.concatenate([feed(session, {0: part}, past)[0] for part in (tokens[:cut], tokens[cut:])])
    np.testing.assert_allclose(got, reference_logits(model, tokens), atol=TOLERANCE, rtol=0)
