# SPDX-License-Identifier: Apache-2.0
"""Text for the drafters: continuations that the demo checkpoint's own engine writes, and blocks in them.

A drafter is to guess what the target writes, so that is what it learns from; the prompts are beginnings of the target's
training rows, and train it too. The engine is nemo-build's.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import data
import numpy as np
import torch
import train
from draft_model import DRAFTS, Blocks
from tokenizers import Tokenizer

from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.export.exporter import export_bundle
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, read_texts
from nemo_build.runtime import Engine, SamplingParams

SLOTS = 16
HELD_OUT_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 16, 64, 128


@dataclass(frozen=True)
class Written:
    """What the target wrote.

    Attributes:
        documents: Token ids of training documents, prompts included.
        held_out: By kind, greedy texts of held-out prompts,
            int64 [HELD_OUT_PROMPTS, PROMPT_TOKENS + NEW_TOKENS + 1].
    """

    documents: list[np.ndarray]
    held_out: dict[str, np.ndarray]


def build(checkpoint: Path, drafts: Sequence[Path], folder: Path) -> Path:
    """An engine of the checkpoint, with drafters, in ``folder``."""
    bundle = export_bundle(checkpoint, folder / "bundle", drafts=drafts).out
    return build_engine(bundle, folder / "engine", options=BuildOptions(SLOTS, 1024)).out


def held_out_prompts(tokenizer: Tokenizer, corpus: data.Corpus, seed: int) -> dict[str, list[list[int]]]:
    """Prompts by kind: the default calibration text, which nothing here was trained on, and validation texts."""
    texts = {**corpus.valid, "chat": data.chats(corpus.valid_entries, seed * 1000 + 999)}
    prompts = {
        kind: data.valid_rows(data.encode(tokenizer, some), PROMPT_TOKENS, HELD_OUT_PROMPTS)[:, :-1].tolist()
        for kind, some in texts.items()
    }
    encoded = [tokenizer.encode(text, add_special_tokens=False).ids for text in read_texts(DEFAULT_TEXT)]
    fitting = [ids[:PROMPT_TOKENS] for ids in encoded if len(ids) >= PROMPT_TOKENS]
    return {"calibration": fitting[:HELD_OUT_PROMPTS], **prompts}


def training_prompts(rows: train.Rows, count: int, seed: int) -> list[list[int]]:
    """Beginnings of training rows, of 16 to 127 tokens."""
    lengths = np.random.default_rng(seed).integers(16, 128, count).tolist()
    return [row[0, :n].tolist() for row, n in zip(rows.batches(1, 0), lengths, strict=False)]


def write(
    checkpoint: Path,
    prompts: list[list[int]],
    held_out: dict[str, list[list[int]]],
    length: int,
    threads: int,
    log: train.Log,
) -> Written:
    """Continue the training prompts to at most ``length + 1`` tokens, and the held-out ones greedily.

    Training texts end where the target ends them. Every other one is greedy, the rest are sampled at temperatures
    from 0.5 to 1.
    """
    greedy = SamplingParams(max_tokens=NEW_TOKENS + 1, temperature=0, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine.load(build(checkpoint, [], Path(folder)), threads=threads)

        def continued(some: list[list[int]], params: SamplingParams | list[SamplingParams]):
            texts = engine.generate(some, params)
            return [np.array([*p, *t.token_ids], np.int64) for p, t in zip(some, texts, strict=True)]

        valid = {kind: np.stack(continued(some, greedy)) for kind, some in held_out.items()}
        documents: list[np.ndarray] = []
        while len(documents) < len(prompts):
            part = prompts[len(documents) : len(documents) + 512]
            params = [
                SamplingParams(
                    max_tokens=length + 1 - len(p), temperature=(i % 2) * (0.5 + i % 11 / 20), seed=i
                )
                for i, p in enumerate(part, len(documents))
            ]
            documents += continued(part, params)
            log(f"{len(documents)} of {len(prompts)} texts written")
    return Written(documents, valid)


class BlockRows:
    """Endless batches of blocks; which a step gets depends on the seed and the step only.

    Args:
        documents: Token ids of texts.
        length: Of a row of texts.
        anchors: Blocks of a row.
        seed: Of the order and of the anchors.
    """

    def __init__(self, documents: list[np.ndarray], length: int, anchors: int, seed: int) -> None:
        self.documents, self.length, self.anchors, self.seed = documents, length, anchors, seed

    def batches(self, batch: int, skip: int) -> Iterator[Blocks]:
        """Batches of ``batch`` rows, without the first ``skip`` of them."""
        step = itertools.count()
        for epoch in itertools.count():
            rng = np.random.default_rng([self.seed, epoch])
            rows = data.chat_rows(self.documents, self.length, rng)
            for start in range(0, len(rows) - batch + 1, batch):
                if (now := next(step)) >= skip:
                    yield self.blocks(np.stack(rows[start : start + batch]), now)

    def blocks(self, ids: np.ndarray, step: int) -> Blocks:
        """Random anchors in rows int64 [B, L + 1]; two in three blocks are whole, the others shorter."""
        rng = np.random.default_rng([self.seed, 1, step])
        shape = len(ids), self.anchors
        anchors = rng.integers(1, self.length - DRAFTS, shape, endpoint=True)
        drafts = np.where(rng.random(shape) < 2 / 3, DRAFTS, rng.integers(1, DRAFTS, shape))
        return Blocks(*(torch.from_numpy(x) for x in (ids, anchors, drafts)))


def evaluation_blocks(ids: np.ndarray, stride: int = 4) -> Blocks:
    """Whole blocks in held-out texts [B, L + 1], one every ``stride`` tokens of what the target wrote."""
    anchors = np.arange(PROMPT_TOKENS, ids.shape[1] - 1 - DRAFTS, stride)
    anchors = np.broadcast_to(anchors, (len(ids), len(anchors))).copy()
    return Blocks(*(torch.from_numpy(x) for x in (ids, anchors, np.full_like(anchors, DRAFTS))))
