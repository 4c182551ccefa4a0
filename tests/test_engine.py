# SPDX-License-Identifier: Apache-2.0
"""The Python API on the demo engine."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import NemotronHForCausalLM

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.demo import CHECKPOINT
from nemo_build.engines.ort import OrtSession
from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime import Engine, FinishReason, SamplingParams, Scheduling
from nemo_build.runtime.opening import Opened
from nemo_build.runtime.scheduler import Scheduler
from nemo_build.runtime.tokenizer import Tokenizer

from .tiny import feed, fix_time_step_clamp, reference_logits

PROMPTS = ["The :mod:`json` module", "def main():\n    ", "import", "Lists are " * 40, "é漢🎈 ", "class A:\n"]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory)


@pytest.fixture(scope="module")
def reference() -> NemotronHForCausalLM:
    model = NemotronHForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    fix_time_step_clamp(model)
    return model


def test_greedy_equals_transformers(engine, reference):
    """Token for token, for every prompt."""
    for prompt, got in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        ids = torch.tensor([engine.tokenizer.encode(prompt)])
        with torch.no_grad():
            want = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=40,
                eos_token_id=[-1],
            )
        assert list(got.token_ids) == want[0, ids.shape[1] :].tolist(), prompt


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_batch_changes_nothing(engine, temperature):
    """More prompts than slots, of unequal lengths and budgets: each gets what it gets alone."""
    params = [
        SamplingParams(max_tokens=10 + 7 * i, temperature=temperature, seed=i, top_p=0.9, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    together = engine.generate(PROMPTS, params)
    assert len(PROMPTS) > engine.session.slots
    for prompt, p, got in zip(PROMPTS, params, together, strict=True):
        assert engine.generate(prompt, p) == [got]
        assert len(got.token_ids) == p.max_tokens


@pytest.mark.parametrize("chunk", [1, 3, 64, 1000])
def test_chunking_of_the_prompt_changes_nothing(engine, chunk):
    want = engine.generate(PROMPTS[3], GREEDY)
    assert engine.generate(PROMPTS[3], GREEDY, scheduling=Scheduling(prefill_chunk=chunk)) == want


def test_stream_is_generate_in_pieces(engine):
    want = engine.generate(PROMPTS, GREEDY)
    chunks = list(engine.stream(PROMPTS, GREEDY))
    for i, completion in enumerate(want):
        mine = [c for c in chunks if c.index == i]
        assert "".join(c.text for c in mine) == completion.text
        assert tuple(c.token_id for c in mine) == completion.token_ids
        assert [c.finish_reason for c in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason is FinishReason.LENGTH
        assert completion.text == engine.tokenizer.decode(completion.token_ids, skip_special_tokens=True)


def test_abandoned_stream_harms_nobody(engine):
    want = engine.generate(PROMPTS[:2], GREEDY)
    stream = engine.stream(PROMPTS, GREEDY)
    for _ in range(5):
        next(stream)
    stream.close()
    assert engine.generate(PROMPTS[:2], GREEDY) == want


def test_interleaved_streams_share_the_engine(engine):
    """Streams that are read in turns, and a call in between, get what each gets alone."""
    want = engine.generate(PROMPTS, GREEDY)
    streams = [engine.stream(p, GREEDY) for p in PROMPTS]
    texts = [""] * len(streams)
    for turn in range(40):
        for i, stream in enumerate(streams):
            texts[i] += next(stream).text
        if turn == 5:
            assert engine.generate(PROMPTS[1], GREEDY) == want[1:2]
    assert texts == [w.text for w in want]
    assert all(next(stream, None) is None for stream in streams)


def test_threads_share_the_engine(engine):
    want = engine.generate(PROMPTS, GREEDY)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        got = list(pool.map(lambda p: engine.generate(p, GREEDY)[0], PROMPTS * 2))
    assert got == want * 2


def test_numpy_tokens_are_a_prompt(engine):
    ids = engine.tokenizer.encode(PROMPTS[0])
    assert engine.generate(np.array(ids), GREEDY) == engine.generate(PROMPTS[0], GREEDY)


def test_broken_logits_end_only_their_sequence(engine):
    """An engine that computes NaN says so, and stays usable."""
    want = engine.generate(PROMPTS[0], GREEDY)
    step = engine.session.step

    def broken(batch):
        out = step(batch)
        out.logits[:1] = np.nan
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.session, "step", broken)
        with pytest.raises(BundleError, match=r"inspect --verify"):
            engine.generate(PROMPTS[0], GREEDY)
    assert engine.generate(PROMPTS[0], GREEDY) == want


def test_a_step_that_fails_ends_those_that_ran_and_nobody_else(demo_engine_directory):
    engine = Engine.load(demo_engine_directory, max_sequences=1)
    want = engine.generate(PROMPTS[1], GREEDY)
    running = engine.stream(PROMPTS[0], GREEDY)
    next(running)
    step, fails = engine.session.step, iter([True])

    def once(batch):
        if next(fails, False):
            raise RuntimeError("the device is gone")
        return step(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.session, "step", once)
        assert (
            engine.generate(PROMPTS[1], GREEDY) == want
        )  # it waited when its thread made the step that failed
    with pytest.raises(BundleError, match="the device is gone"):
        list(running)
    assert engine.statistics().failed == 1


def test_pending_tokens_change_nothing(demo_engine_directory, engine):
    """A session that leaves tokens uncommitted, as speculation needs, generates the same."""
    session = OrtSession(demo_engine_directory / "target.onnx", slots=2, context=512, pending=5)
    manifest = read_manifest(demo_engine_directory, ENGINE_BUNDLE)
    pending = Engine(engine.directory, Opened(manifest, session, Scheduler(session), None))
    assert pending.generate(PROMPTS, GREEDY) == engine.generate(PROMPTS, GREEDY)


def test_seed_decides(engine):
    def sampled(seed):
        return engine.generate(PROMPTS[0], SamplingParams(max_tokens=30, seed=seed, ignore_eos=True))[
            0
        ].token_ids

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)
    assert sampled(None) != sampled(None)


def test_stop_string_is_cut(engine):
    text = engine.generate(PROMPTS[0], GREEDY)[0].text
    stop = text[10:14]
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=stop)
    got = engine.generate(PROMPTS[0], params)[0]
    assert got.text == text[: text.index(stop)]
    assert got.finish_reason is FinishReason.STOP


def test_every_end_token_ends(engine):
    assert set(engine.spec.generation.eos_token_ids) == {2, 11}
    for eos in engine.spec.generation.eos_token_ids:
        params = SamplingParams(max_tokens=9, temperature=0, logit_bias={eos: 100.0}, min_tokens=3)
        got = engine.generate(PROMPTS[0], params)[0]
        assert got.token_ids[-1] == eos
        assert len(got.token_ids) == 4
        assert got.finish_reason is FinishReason.STOP
        assert got.matched == eos


def test_context_is_a_limit(engine):
    tokens = list(range(40, 140)) * 10
    got = engine.generate([tokens[:1000]], SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))[0]
    assert len(got.token_ids) == engine.session.context - 1000 + 1
    assert got.finish_reason is FinishReason.LENGTH


def test_penalties_are_applied(engine):
    plain = engine.generate(PROMPTS[3], GREEDY)[0].token_ids
    params = SamplingParams(
        max_tokens=40, temperature=0, ignore_eos=True, presence_penalty=2, frequency_penalty=2
    )
    penalised = engine.generate(PROMPTS[3], params)[0].token_ids
    assert len(set(penalised)) > len(set(plain))


def test_wrong_prompts_are_all_named(engine):
    with pytest.raises(RequestError) as caught:
        engine.generate([[], [1] * 2000, [5, 99999], "fine"], GREEDY)
    assert len(caught.value.problems) == 3
    with pytest.raises(RequestError, match="2 prompts, but 1"):
        engine.generate(["a", "b"], [GREEDY])


def test_chat_prompt(engine):
    def text(**kwargs):
        ids = engine.chat_prompt([{"role": "user", "content": "Hi"}], **kwargs)
        return engine.tokenizer.decode(ids, skip_special_tokens=False)

    end = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>"
    assert text(enable_thinking=False).endswith(end + "</think>")
    assert text().endswith(end + "\n")
    with pytest.raises(RequestError):
        engine.chat_prompt([{"role": 1}])


def test_smaller_sizes_at_load(demo_engine_directory, engine):
    small = Engine.load(demo_engine_directory, max_sequences=1, max_context=64, threads=1)
    assert small.generate(PROMPTS[:2], GREEDY) == engine.generate(PROMPTS[:2], GREEDY)
    with pytest.raises(RequestError) as caught:
        Engine.load(demo_engine_directory, max_sequences=9, max_context=0)
    assert len(caught.value.problems) == 2
    with pytest.raises(RequestError, match="threads"):
        Engine.load(demo_engine_directory, threads=0)


def test_engine_of_an_unknown_backend(demo_engine_directory, tmp_path):
    shutil.copytree(demo_engine_directory, tmp_path / "engine")
    path = tmp_path / "engine" / "engine.json"
    manifest = json.loads(path.read_text())
    manifest["backend"]["name"] = "abacus"
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="abacus"):
        Engine.load(tmp_path / "engine")


@pytest.mark.parametrize("chunk", [1, 127, 128, 129, 300])
def test_logits_of_the_demo_checkpoint(demo_engine_directory, reference, chunk):
    """Chunks of every size, beside a second sequence that decodes: logits within 1e-4 of transformers."""
    tokenizer = Tokenizer.load(demo_engine_directory)
    text = (CHECKPOINT / "README.md").read_text(encoding="utf-8") * 2
    tokens, other = tokenizer.encode(text)[: 60 if chunk == 1 else 310], tokenizer.encode(text[::-1])[:40]
    session = OrtSession(demo_engine_directory / "target.onnx", slots=2, context=512)
    past: dict[int, int] = {}
    got: dict[int, list] = {0: [], 1: []}
    starts = range(0, len(tokens), chunk)
    for turn, start in enumerate(starts):
        rows = {1: tokens[start : start + chunk], 0: other[turn : turn + 1]}
        for slot, logits in feed(session, {s: r for s, r in rows.items() if r}, past).items():
            got[slot].append(logits)
    for slot, sequence in ((1, tokens), (0, other[: len(starts)])):
        want = reference_logits(reference, sequence)
        np.testing.assert_allclose(np.concatenate(got[slot]), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["weights.bin", "target.onnx", "tokenizer.json", "engine.json"])
@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damaged_engine(demo_engine_directory, tmp_path, name, damage):
    broken = tmp_path / "engine"
    shutil.copytree(demo_engine_directory, broken)
    path: Path = broken / name
    data = path.read_bytes()
    path.unlink()
    if damage == "short":
        path.write_bytes(data[: len(data) // 2])
    with pytest.raises(BundleError, match=name.replace(".", r"\.")):
        Engine.load(broken)
