# SPDX-License-Identifier: Apache-2.0
"""The Python API on the demo engine."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import NemotronHForCausalLM

from nemo_build.demo import CHECKPOINT
from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime import Engine, FinishReason, SamplingParams

from .tiny import fix_time_step_clamp

PROMPTS = ["The :mod:`json` module", "def main():\n    ", "import", "Lists are " * 40, "é漢🎈 ", "class A:\n"]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory)


def test_greedy_equals_transformers(engine):
    """Token for token, for every prompt."""
    model = NemotronHForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    fix_time_step_clamp(model)
    for prompt, got in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
        ids = torch.tensor([engine.tokenizer.encode(prompt)])
        with torch.no_grad():
            want = model.generate(
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
    assert engine.generate(PROMPTS[3], GREEDY, prefill_chunk=chunk) == want


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
    text = engine.chat_prompt([{"role": "user", "content": "Hi"}], enable_thinking=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think></think>")
    assert engine.chat_prompt([{"role": "user", "content": "Hi"}]).endswith(
        "<|im_start|>assistant\n<think>\n"
    )
    with pytest.raises(RequestError):
        engine.chat_prompt([{"role": 1}])


def test_smaller_sizes_at_load(demo_engine_directory, engine):
    small = Engine.load(demo_engine_directory, max_sequences=1, max_context=64, threads=1)
    assert small.generate(PROMPTS[:2], GREEDY) == engine.generate(PROMPTS[:2], GREEDY)
    with pytest.raises(RequestError) as caught:
        Engine.load(demo_engine_directory, max_sequences=9, max_context=0)
    assert len(caught.value.problems) == 2


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
