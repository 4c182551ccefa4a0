# SPDX-License-Identifier: Apache-2.0
"""The drafters' checkpoints, what they are worth in the engine, and their model cards."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import draft_data
import torch
import train
from draft_model import CONFIGS, Drafter
from safetensors.torch import save_file
from torch import nn

from nemo_build.runtime import Engine, SamplingParams

LENGTHS = (2, 4, 7)
MODES = {
    "greedy": SamplingParams(max_tokens=draft_data.NEW_TOKENS, temperature=0, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=draft_data.NEW_TOKENS, temperature=1, seed=0, ignore_eos=True),
}


def save(name: str, drafter: Drafter, out: Path) -> None:
    """Write a checkpoint in the published format, everything in BF16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {n: value.detach().bfloat16().contiguous() for n, value in drafter.state_dict().items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(CONFIGS[name], indent=2) + "\n", "utf-8")


def measure(
    checkpoint: Path, drafts: dict[str, Path], prompts: dict[str, list[list[int]]], threads: int
) -> dict[str, dict]:
    """Acceptance lengths in the engine: by drafter, mode and draft length, then by kind of prompt."""
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        directory = draft_data.build(checkpoint, list(drafts.values()), Path(folder))
        for name in drafts:
            for mode, params in MODES.items():
                for length in LENGTHS:
                    case = found.setdefault(name, {}).setdefault(mode, {}).setdefault(length, {})
                    for kind, some in prompts.items():
                        options = {"threads": threads, "speculate": name, "draft_length": length}
                        engine = Engine.load(directory, **options)
                        engine.generate(some, params)
                        case[kind] = round(engine.acceptance.length, 3)
    return found


# ---------------------------------------------------------------------------------------------------
# model cards

CARD = """# A {title} drafter for the demo checkpoint

{description}

{parameters:.2f} million parameters in BF16, in the published format of `{architecture}`; embeddings and output head
are those of its target, [the demo checkpoint](../../checkpoint/README.md), whose residual stream it taps after layers
{taps}. It drafts up to {drafts} tokens at a time:

```
nemo-build export nemo_build/demo/checkpoint --draft nemo_build/demo/drafters/{name} -o bundle
nemo-build build bundle -o engine --target cpu
nemo-build generate engine "The :mod:`json` module" --speculate {name} --draft-length 4
```

## Training

By `python scripts/train_demo drafters`, against the frozen target: {steps} steps of {batch} x {length} tokens with
{anchors} blocks at random places in each row; Muon for the matrices, AdamW for the rest, linear decay over the last
{decay} steps. The text is {documents} beginnings of the target's training rows (16 to 127 tokens), continued by the
target itself, every other one greedily and the rest at temperatures from 0.5 to 1; {tokens:.1f} million tokens
altogether. A block sees the context before its anchor and no other block.

{loss}

## Measured

Acceptance length, that is tokens of a verification on average, in the engine: {prompts} prompts of {prompt_tokens}
tokens a kind, {new} new tokens each. `calibration` is the default calibration text, which neither the target nor the
drafter was trained on; the others are the target's held-out files. Sampling is at temperature 1. Greedy text of so
small a model repeats itself, which helps.

| | drafts | {kinds} |
|---|---|{rule}
{rows}

The texts are those of plain decoding, whatever is drafted. Licence and sources of the text are the target's.
"""

ABOUT = {
    "dflash": (
        "DFlash",
        """DFlash ([arXiv:2602.06036](https://arxiv.org/abs/2602.06036)): the tokens of a block see each other and are
chosen independently.""",
        """The loss is cross-entropy, weighted exp(-(k-1)/4) for draft k. One block in three is shorter than the rest,
since fewer drafts make another block where tokens see later ones.""",
    ),
    "dspark": (
        "DSpark",
        """DSpark ([arXiv:2607.05147](https://arxiv.org/abs/2607.05147)): a causal block with attention sinks, whose
tokens are chosen one after the other with a Markov head; a confidence head says how likely each is to be accepted.""",
        """The loss is 0.1 cross-entropy + 0.9 L1 distance of the drafter's and the target's distributions + binary
cross-entropy of the confidence against the probability of acceptance, 1 - L1/2; all weighted exp(-(k-1)/4) for draft
k. The confidence head does not shape the hidden states that it reads.""",
    ),
}
"""Title, description, and how each is trained."""


def card(
    name: str, drafter: Drafter, plan: train.Plan, rows: draft_data.BlockRows, found: dict[str, dict]
) -> str:
    """The model card of a drafter with its measurements."""
    title, description, loss = ABOUT[name]
    cases = [(mode, n, case) for mode, by_length in found.items() for n, case in by_length.items()]
    kinds = list(cases[0][2])
    return CARD.format(
        name=name,
        title=title,
        description=description,
        loss=loss,
        architecture=drafter.spec.architecture,
        parameters=sum(p.numel() for p in drafter.parameters()) / 1e6,
        taps=", ".join(map(str, drafter.spec.taps)),
        drafts=drafter.spec.max_drafted,
        steps=plan.steps,
        batch=plan.batch,
        length=plan.length,
        decay=plan.decay,
        anchors=rows.anchors,
        documents=len(rows.documents),
        tokens=sum(map(len, rows.documents)) / 1e6,
        prompts=draft_data.HELD_OUT_PROMPTS,
        prompt_tokens=draft_data.PROMPT_TOKENS,
        new=draft_data.NEW_TOKENS,
        kinds=" | ".join(kinds),
        rule="---|" * len(kinds),
        rows="\n".join(
            f"| {mode} | {n} | {' | '.join(f'{case[kind]:.2f}' for kind in kinds)} |"
            for mode, n, case in cases
        ),
    )


def write(
    drafters: nn.ModuleDict,
    checkpoint: Path,
    prompts: dict[str, list[list[int]]],
    plan: train.Plan,
    rows: draft_data.BlockRows,
    out: Path,
    work: Path,
) -> None:
    """Write the drafters' checkpoints, measure them, and write their cards; measurements also as JSON into ``work``."""
    for name, drafter in drafters.items():
        save(name, drafter, out / name)
    found = measure(checkpoint, {n: out / n for n in drafters}, prompts, torch.get_num_threads())
    (work / "drafters.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    for name, drafter in drafters.items():
        (out / name / "README.md").write_text(card(name, drafter, plan, rows, found[name]), "utf-8")
