# SPDX-License-Identifier: Apache-2.0
"""Public bug reports of other runtimes about recurrent state, chunks and prefix caches, as behaviours of this one.

Reports whose behaviour is tested elsewhere:

- NVIDIA/TensorRT-LLM#12573, a step in which rows have different numbers of tokens:
  ``test_parity.test_batch_of_unequal_lengths_then_mixed_decode``
- NVIDIA/TensorRT-LLM#16193, NaN in padded rows, op by op: ``test_plugins.test_padding_never_touches_other_rows``
- NVIDIA/TensorRT-LLM#16193, NaN of padded rows in attention:
  ``test_cached_attention.test_what_no_query_sees_may_be_anything``
- vllm#34587, part of a block, in the cache alone: ``test_prefix_cache.test_partial_block_never_hits_stale_state``
- vllm#43559, drafts of a drafter that starts behind a cached prefix:
  ``test_speculator_restart.test_a_restart_drafts_the_same``
- kekzl/imp#443, what is bound once and reused by later steps, on a CPU:
  ``test_session.test_arrays_may_be_written_to_between_steps``
- transformers#46741, division into steps, op by op: ``test_selective_scan.test_division_into_steps_changes_no_bit``
  and ``test_cached_attention.test_division_into_steps_changes_no_bit``

Not applicable: kekzl/imp#443 as reported, a pointer that a captured CUDA graph keeps; the CPU backend captures none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from nemo_build.demo import CHECKPOINT
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.export.exporter import export_bundle
from nemo_build.plugins import native
from nemo_build.runtime import Engine, SamplingParams, Scheduling
from nemo_build.runtime.output import Completion
from nemo_build.runtime.speculation.acceptance import Acceptance
from nemo_build.state import stays_pending

from .draft_reference import CONFIGS, DraftReference, save_draft
from .test_draft_speculation import for_demo
from .test_prefix_cache_engine import same
from .tiny import feed, open_exported, reference_logits, reference_model, save_checkpoint

BLOCK = 64
"""Tokens in a block of an engine's prefix cache."""

BYTES = 1 << 28
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, temperature=0)
SPECULATORS = ["mtp", "dflash", "dspark", "ngram"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """An engine of the demo checkpoint with its MTP module and random drafters of both kinds, in float32."""
    out = tmp_path_factory.mktemp("reports")
    tables = load_file(CHECKPOINT / "model.safetensors")
    embeddings, head = (tables[n].float() for n in ("backbone.embeddings.weight", "lm_head.weight"))
    for name in ("dflash", "dspark"):
        save_draft(DraftReference(for_demo(CONFIGS[name]), embeddings, head), out / name)
    bundle = export_bundle(CHECKPOINT, out / "bundle", drafts=[out / "dflash", out / "dspark"]).out
    return build_engine(bundle, out / "engine", options=BuildOptions(4, 1024, activations="float32")).out


@pytest.fixture(scope="module")
def plain(directory) -> Engine:
    """Without a cache and without speculation."""
    return load(directory)


@pytest.fixture(scope="module")
def text(plain) -> list[int]:
    """Tokens of the demo checkpoint's own kind of text."""
    return plain.tokenizer.encode((CHECKPOINT / "README.md").read_text(encoding="utf-8"))[:900]


def load(directory: Path, **options: Any) -> Engine:
    """The engine on one thread."""
    return Engine.load(directory, threads=1, **options)


def last_logits(engine: Engine, prompt: list[int], **scheduling: Any) -> tuple[np.ndarray, int]:
    """The logits after a prompt, and how many of its tokens came from the cache."""
    step, seen = engine.session.step, []

    def record(batch: StepBatch) -> Any:
        seen.append(step(batch))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.session, "step", record)
        (done,) = engine.generate([prompt], ONE, scheduling=Scheduling(**scheduling))
    return seen[-1].logits[-1], done.cached_tokens


@pytest.fixture(scope="module")
def truth(directory) -> Callable[[list[int]], np.ndarray]:
    """The same in one chunk, from a session without a cache."""
    session = OrtSession(directory / "target.onnx", slots=1, context=1024, threads=1)
    known: dict[tuple[int, ...], np.ndarray] = {}

    def logits(prompt: list[int]) -> np.ndarray:
        batch = StepBatch.of_rows([prompt], past=[0], slots=[0])
        key = tuple(prompt)
        if key not in known:
            known[key] = session.step(batch).logits[-1]
        return known[key]

    return logits


def drafting(
    engine: Engine, prompt: list[int], params: SamplingParams, **scheduling: Any
) -> tuple[Completion, tuple[list[int], list[int]]]:
    """A completion, and how many drafts were made and accepted for it, by position."""
    old: Acceptance = engine.acceptance
    before = [list(old.drafted), list(old.accepted)]
    (done,) = engine.generate([prompt], params, scheduling=Scheduling(**scheduling))
    counts = []
    for earlier, now in zip(before, (engine.acceptance.drafted, engine.acceptance.accepted), strict=True):
        counts.append([n - (earlier[i] if i < len(earlier) else 0) for i, n in enumerate(now)])
    return done, (counts[0], counts[1])


def poison(engine: Engine, slots: Any) -> None:
    """Fill the state of slots with NaN."""
    for buffer in engine.session.state().values():
        buffer[slots] = np.nan


# --- sequences beside each other --------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", ["none", "mtp"])
def test_requests_that_share_a_step_do_not_poison_each_other_with_nan(directory, plain, text, speculate):
    """vllm#34874: requests with and without cached prefixes start together, in slots that hold NaN."""
    prompts = [text[:90], text[:70] + text[200:230], text[300:307], text[400:541]]
    engine = load(directory, speculate=speculate, prefix_cache=BYTES)
    poison(engine, slice(None))
    engine.generate([text[:70]], ONE)
    poison(engine, slice(None))
    got = engine.generate(prompts, GREEDY, scheduling=Scheduling(prefill_chunk=50))
    assert got == plain.generate(prompts, GREEDY)
    assert [c.cached_tokens for c in got] == [70, 70, 0, 0]


@pytest.mark.parametrize("speculate", ["none", "mtp"])
def test_a_sequence_that_breaks_takes_nobody_with_it_and_leaves_nothing_in_the_cache(
    directory, plain, text, speculate
):
    """vllm#34874: one of four running sequences computes NaN; not even its own text is served from the cache."""
    prompts = [text[a : a + n] for a, n in ((0, 70), (100, 66), (250, 9), (300, 140))]
    engine = load(directory, speculate=speculate, draft_length=None, prefix_cache=BYTES)
    requests = engine.requests(prompts, GREEDY)
    engine.add(requests)
    while min(len(r.output) for r in requests) < 3:
        engine.step()
    broken = requests[1]
    poison(engine, broken.slot)
    while engine.unfinished:
        engine.step()
    assert broken.error is not None
    want = plain.generate(prompts, GREEDY)
    for request, completion in zip(requests, want, strict=True):
        if request is not broken:
            assert request.output == list(completion.token_ids)
    again = [*broken.tokens, *text[600:610]]
    assert engine.generate([prompts[1], again], GREEDY) == plain.generate([prompts[1], again], GREEDY)


@pytest.mark.parametrize("kernels", ["reference", *native.instruction_sets()[-1:]])
def test_what_padding_embeds_to_reaches_nobody(tmp_path, kernels):
    """TensorRT-LLM#16193: the token that rows are padded with has an embedding of NaN, through every kind of layer."""
    model = reference_model(hybrid_override_pattern="MEM*E-")
    save_checkpoint(model, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    tensors["backbone.embeddings.weight"][0] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})
    rng = np.random.default_rng(0)
    texts = {slot: rng.integers(1, 96, n).tolist() for slot, n in ((2, 40), (0, 3), (3, 17))}
    with native.forced(kernels):
        session = open_exported(tmp_path / "checkpoint", tmp_path / "bundle", pending=4)
    past: dict[int, int] = {}
    got = feed(session, {2: texts[2][:30], 1: [], 0: texts[0][:2], 3: texts[3][:16]}, past)
    more = feed(
        session, {2: texts[2][30:], 1: [], 0: texts[0][2:], 3: texts[3][16:]}, past, accepted=[0, 0, 2, 0]
    )
    for slot, tokens in texts.items():
        logits = np.concatenate([got[slot], more[slot]])
        np.testing.assert_allclose(logits, reference_logits(model, tokens), atol=1e-4, rtol=0)


# --- prefix cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", ["none", "mtp"])
@pytest.mark.parametrize("chunk", [BLOCK - 1, BLOCK, BLOCK + 1])
@pytest.mark.parametrize("length", [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 2 * BLOCK + 30])
def test_chunks_and_prefixes_that_end_beside_a_block_boundary_change_no_logit(
    boundary_engines, truth, text, speculate, chunk, length
):
    """vllm#34587, vllm#57605, qwen38-rtx3090#43: only whole, committed prefixes match, whatever chunks they came in."""
    engine = boundary_engines[speculate]
    scheduling = {"prefill_chunk": chunk, "salt": (chunk, length)}
    first = text[:length]
    prompts = [
        first,
        first + text[300:330],  # goes on where the first ended
        first[:-3] + text[400:430],  # leaves it within its last block: no state is known there
        first[:-3] + text[500:530],  # and again: now it is, at the block's beginning
        first[:-3] + text[400:440],
    ]
    boundary = (length - 3) // BLOCK * BLOCK
    matched = []
    for prompt in prompts:
        got, cached = last_logits(engine, prompt, **scheduling)
        same(got, truth(prompt))
        matched.append(cached)
    assert matched == [0, length, 0, boundary, length + 27]


@pytest.fixture(scope="module")
def boundary_engines(directory) -> dict[str, Engine]:
    """By speculator: engines with a cache; each test has a salt of its own."""
    sizes = {"prefix_cache": BYTES, "max_sequences": 2}
    return {
        "none": load(directory, **sizes),
        "mtp": load(directory, **sizes, speculate="mtp", draft_length=4),
    }


@pytest.mark.parametrize("speculate", SPECULATORS)
def test_speculation_behind_cached_prefixes_is_speculation_without_them(directory, plain, text, speculate):
    """vllm#39809, vllm#41233, vllm#43559, vllm#43650, vllm#53912: no crash, the same texts, as many drafts accepted."""
    options = {"speculate": speculate, "draft_length": 3}
    engine, without = load(directory, **options, prefix_cache=BYTES), load(directory, **options)
    system, each = text[: BLOCK + 9], [GREEDY, SAMPLED, GREEDY]
    conversations = [system + text[a : a + n] for a, n in ((300, 20), (400, 1), (500, 55))]
    for turn in range(2):
        for i, (prompt, params) in enumerate(zip(conversations, each, strict=True)):
            (want,) = plain.generate([prompt], params)
            done, counts = drafting(engine, prompt, params, prefill_chunk=41 + turn)
            assert done == want
            assert (want, counts) == drafting(without, prompt, params)
            conversations[i] = [*prompt, *done.token_ids, *text[600 + 20 * i + turn :][:11]]
    statistics = engine.cache_statistics()
    assert statistics.hits == 4  # the third prompt with the common beginning, and all second turns
    assert statistics.saved_tokens > 4 * BLOCK
    assert engine.generate(conversations, each) == plain.generate(conversations, each)
    assert engine.cache_statistics().hits == 7


@pytest.mark.parametrize("speculate", ["none", *SPECULATORS])
def test_the_prefix_cache_is_not_silently_off(directory, text, speculate):
    """vllm#54504: what a prompt shares with an earlier one is not fed again, and the statistics say so."""
    engine = load(directory, speculate=speculate, prefix_cache=BYTES)
    step, fed = engine.session.step, []

    def record(batch: StepBatch) -> Any:
        fed.append(int(batch.lengths.sum()))
        return step(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.session, "step", record)
        engine.generate([text[:200]], ONE)
        (again,) = engine.generate([text[:230]], ONE)
    assert fed == [200, 30]
    assert again.cached_tokens == 200
    statistics = engine.cache_statistics()
    assert (statistics.queries, statistics.hits, statistics.saved_tokens) == (2, 1, 200)


# --- chunks -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mtp(directory) -> Engine:
    """With MTP drafts, a fixed number of them."""
    return load(directory, speculate="mtp", draft_length=4)


@pytest.mark.parametrize("chunk", [1, 2, 16, 37])
@pytest.mark.parametrize("rest", [-1, 0, 1])
def test_a_last_chunk_of_any_size_drafts_what_one_chunk_does(mtp, plain, text, chunk, rest):
    """vllm#35447: prompts of whole chunks, of one token less, and of one more, with MTP."""
    whole = text[50 : 50 + 12 // chunk * chunk + 2 * chunk + rest]
    for prompt, params in ((whole, GREEDY), (whole, SAMPLED), (whole[:1], GREEDY)):
        want, counts = drafting(mtp, prompt, params, prefill_chunk=512)
        assert want == plain.generate([prompt], params)[0]
        done, chunked = drafting(mtp, prompt, params, prefill_chunk=chunk)
        assert done == want
        if len(prompt) % chunk != 1 % chunk:
            assert chunked == counts
        else:  # a last token alone is fed like the last one of a text, with drafts behind it
            assert sum(chunked[1]) >= sum(counts[1]) - 4


@pytest.mark.parametrize("speculate", ["none", "mtp"])
@pytest.mark.parametrize("chunks", [3, 4, 9])
def test_a_prompt_in_three_or_more_chunks_ends_and_equals_one_chunk(
    directory, plain, text, speculate, chunks
):
    """kekzl/imp#104: as many steps as chunks, then the text that one chunk leads to."""
    size = 31
    engine = load(directory, speculate=speculate, draft_length=None)
    (request,) = engine.requests([text[: chunks * size]], GREEDY, Scheduling(prefill_chunk=size))
    engine.add([request])
    for n in range(1, chunks + 1):
        engine.step()
        assert request.fed == n * size
    assert len(request.output) == 1
    for _ in range(GREEDY.max_tokens):
        engine.step()
    assert not engine.unfinished
    assert request.output == list(plain.generate([text[: chunks * size]], GREEDY)[0].token_ids)


@pytest.mark.parametrize("pending", [0, 6, 9])
@pytest.mark.parametrize("pieces", [[1] * 7, [2, 2, 1, 2]], ids=["one by one", "in pieces"])
def test_several_tokens_behind_a_prefix_leave_the_state_of_one_by_one(directory, text, pending, pieces):
    """transformers#46741: a cached call with several new tokens advances the state by all of them."""
    if native.library() is None:
        pytest.skip("the reference functions depend on the division into steps in the last bits")
    sizes = {"slots": 2, "context": 128, "pending": pending}
    session = OrtSession(directory / "target.onnx", **sizes, threads=1)
    past: dict[int, int] = {}
    uncommitted = [0, 0]

    def step(slot: int, count: int) -> np.ndarray:
        tokens = text[past[slot] :][:count]
        logits = feed(session, {slot: tokens}, past, accepted=[uncommitted[slot]])[slot]
        uncommitted[slot] = count if stays_pending(count, pending) else 0
        return logits

    feed(session, {0: text[:40], 1: text[:40]}, past)
    several = step(0, 7)
    np.testing.assert_array_equal(several, np.concatenate([step(1, n) for n in pieces]))
    after = [step(slot, 43) for slot in (0, 1)]  # more than can stay pending
    np.testing.assert_array_equal(*after)
    for state in session.states:
        if state.kind != "ssm_pending":
            kept = session.state()[state.name]
            if state.kind == "conv":
                kept = kept[:, : kept.shape[1] - pending]
            np.testing.assert_array_equal(kept[0], kept[1], err_msg=state.name)
