# SPDX-License-Identifier: Apache-2.0
"""The drafters that ship with the package: what they are worth, and the code that trains them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.drafters import drafter_tensors
from nemo_build.export.ledger import reconcile
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, read_texts
from nemo_build.runtime import Engine, SamplingParams
from nemo_build.runtime.tokenizer import Tokenizer
from nemo_build.spec import load_spec
from nemo_build.spec_draft import load_draft

from .draft_reference import DraftReference

SCRIPTS = Path(__file__).parent.parent / "scripts" / "train_demo"
GREEDY = SamplingParams(max_tokens=64, temperature=0)


@pytest.fixture(scope="module")
def prompts(demo_engine_directory) -> list[list[int]]:
    """Beginnings of texts that neither the checkpoint nor the drafters were trained on."""
    tokenizer = Engine.load(demo_engine_directory).tokenizer
    encoded = [tokenizer.encode(text) for text in read_texts(DEFAULT_TEXT)]
    return [ids[:64] for ids in encoded if len(ids) >= 64][:8]


@pytest.fixture
def scripts(monkeypatch):
    """Imports a module of scripts/train_demo, which is not a package; forgets them all afterwards."""
    monkeypatch.syspath_prepend(SCRIPTS)
    for path in SCRIPTS.glob("*.py"):
        monkeypatch.delitem(sys.modules, path.stem, raising=False)
    yield importlib.import_module
    for path in SCRIPTS.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("length", [1, 4, 7])
def test_greedy_text_is_that_of_plain_decoding(demo_engine_directory, prompts, name, length):
    engine = Engine.load(demo_engine_directory, speculate=name, draft_length=length)
    plain = Engine.load(demo_engine_directory)
    assert engine.generate(prompts, GREEDY) == plain.generate(prompts, GREEDY)
    assert engine.acceptance.length > (1.5 if length == 1 else 2)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_configuration_is_what_the_weights_are(name):
    """The ledger finds every tensor, in BF16; embeddings and head are the target's."""
    draft = load_draft(DRAFTERS[name], load_spec(CHECKPOINT))
    assert (draft.kind, draft.max_drafted) == (name, 7)
    assert (draft.own_embeddings, draft.own_head) == (False, False)
    ledger = reconcile(Checkpoint.open(DRAFTERS[name]), drafter_tensors(draft))
    assert {info.dtype for _, info in ledger.entries.values()} == {"BF16"}


def test_they_are_small():
    files = [path / "model.safetensors" for path in DRAFTERS.values()]
    assert sum(path.stat().st_size for path in files) < 2.5e6
    for path in DRAFTERS.values():
        assert (path / "README.md").is_file()


def blocks_of(draft_model: Any) -> Any:
    """Blocks at both ends of two texts and in between, one of them short."""
    ids = torch.randint(0, 3072, (2, 97), generator=torch.Generator().manual_seed(0))
    return draft_model.Blocks(
        ids, torch.tensor([[1, 40, 89], [7, 5, 60]]), torch.tensor([[7, 3, 7], [7, 1, 7]])
    )


@pytest.mark.parametrize("name", DRAFTERS)
def test_many_blocks_in_training_are_single_blocks(scripts, name):
    """The training forward against the reference, which runs one block behind its context."""
    draft_model = scripts("draft_model")
    tables = load_file(CHECKPOINT / "model.safetensors")
    embeddings, head = (tables[n].float() for n in ("backbone.embeddings.weight", "lm_head.weight"))
    config = json.loads((DRAFTERS[name] / "config.json").read_text())
    assert config == draft_model.CONFIGS[name]
    reference = DraftReference(config, embeddings, head)
    drafter = draft_model.make(load_spec(CHECKPOINT))[name]
    drafter.load_state_dict(reference.w)
    blocks, taps = blocks_of(draft_model), torch.randn(2, 96, len(reference.taps) * 192)
    previous = blocks.tokens(0, draft_model.DRAFTS)
    with torch.no_grad():
        hidden = drafter(taps, blocks, embeddings)
        logits = drafter.logits(hidden, previous, head)
    first = 0 if drafter.spec.sample_from_anchor else 1
    for row, block in np.ndindex(2, 3):
        anchor, count = int(blocks.anchors[row, block]), int(blocks.drafts[row, block])
        masks = [draft_model.MASK_TOKEN] * (count - 1 + first)
        tokens = torch.tensor([int(blocks.ids[row, anchor]), *masks])
        want, seen = (t[first:] for t in reference.block(taps[row, :anchor], tokens))
        if drafter.spec.markov_rank:
            want, sure = reference.markov(previous[row, block, :count], want, seen)
            found = torch.sigmoid(drafter.confidence(hidden, previous))[row, block, :count]
            torch.testing.assert_close(found, sure, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits[row, block, :count], want, atol=1e-3, rtol=1e-4)


def test_blocks_follow_from_seed_and_step(scripts):
    """Resuming at a step gives what it would have been."""
    documents = [np.arange(n) for n in (40, 90, 150)]
    rows = scripts("draft_data").BlockRows(documents, 64, 4, seed=0)
    after, whole = rows.batches(2, 1), rows.batches(2, 0)
    next(whole)
    for _ in range(4):
        for resumed, want in zip(vars(next(after)).values(), vars(next(whole)).values(), strict=True):
            assert torch.equal(resumed, want)


def test_a_few_steps_of_training(scripts, tmp_path):
    """All stages on a little text: the target's texts, a falling loss, checkpoints that are what export wants."""
    names = ("draft_data", "draft_model", "draft_train", "draft_report", "export", "train")
    draft_data, draft_model, draft_train, draft_report, export, train = map(scripts, names)
    log, tokenizer = train.Log(tmp_path / "log.txt"), Tokenizer.load(CHECKPOINT)
    texts = [tokenizer.encode(text)[: draft_data.PROMPT_TOKENS] for text in read_texts(DEFAULT_TEXT)[:6]]
    prompts = [ids[:20] for ids in texts]
    written = draft_data.write(CHECKPOINT, prompts, {"some": texts}, 96, 1, log)
    assert [d[:20].tolist() for d in written.documents] == prompts

    rows = draft_data.BlockRows(written.documents, 96, 8, seed=0)
    valid = {"some": draft_data.evaluation_blocks(written.held_out["some"])}
    trunk, drafters = export.load_trunk(CHECKPOINT), draft_model.make(load_spec(CHECKPOINT))
    plan = train.Plan("drafters", 20, 2, 96, 2, 5, 0.02, 3e-3)
    blocks = next(rows.batches(4, 0))
    before = [losses(draft_train, trunk, d, blocks) for d in drafters.values()]
    draft_train.train_drafters(
        trunk, drafters, plan, rows, valid, tmp_path / "state", log, False, train.Threads(1, False), False
    )
    after = [losses(draft_train, trunk, d, blocks) for d in drafters.values()]
    assert all(b < a for a, b in zip(before, after, strict=True))
    for name, drafter in drafters.items():
        draft_report.save(name, drafter, tmp_path / name)
        spec = load_draft(tmp_path / name, load_spec(CHECKPOINT))
        reconcile(Checkpoint.open(tmp_path / name), drafter_tensors(spec))


@torch.no_grad()
def losses(draft_train: Any, trunk: Any, drafter: Any, blocks: Any) -> float:
    teacher = draft_train.Teacher.of(trunk, blocks, drafter.spec.taps, torch.float32)
    return float(draft_train.loss_of_drafter(drafter, trunk, blocks, teacher))
