# SPDX-License-Identifier: Apache-2.0
"""Training of both drafters against the frozen target.

Losses are those of the papers: weighted cross-entropy for DFlash (arXiv:2602.06036); cross-entropy, total variation
and the confidence's binary cross-entropy for DSpark (arXiv:2607.05147). Letters as in draft_model.py, K drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import model
import torch
import torch.nn.functional as F
import train
from draft_model import DRAFTS, Blocks, Drafter
from torch import Tensor, nn

GAMMA = 4.0
"""Draft k weighs exp(-(k - 1) / GAMMA): it counts only if all before it were right."""

DSPARK_WEIGHTS = (0.1, 0.9, 1.0)
"""Of cross-entropy, L1 distance of the distributions, and confidence."""


@dataclass(frozen=True)
class Teacher:
    """What the target says about blocks.

    Attributes:
        taps: Its residual stream after the drafter's layers, [B, L, n * H].
        logits: Its own for the K tokens after each anchor, given the text before them, FP32 [B, A, K, V].
    """

    taps: Tensor
    logits: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, trunk: model.Trunk, blocks: Blocks, taps: tuple[int, ...], dtype: torch.dtype) -> Teacher:
        """Run the target over the texts once."""
        outputs, _ = trunk.backbone.residuals(blocks.ids[:, :-1], dtype)
        at = (blocks.anchors[..., None] + torch.arange(DRAFTS)).flatten(1)
        wanted = outputs[-1].gather(1, at[..., None].expand(-1, -1, trunk.spec.hidden_size))
        logits = trunk.lm_head(trunk.backbone.norm_f(wanted).to(dtype)).float()
        wide = torch.cat([outputs[t] for t in taps], -1).to(dtype)
        return cls(wide, logits.view(*blocks.anchors.shape, DRAFTS, -1))


def weights(blocks: Blocks) -> Tensor:
    """[B, A, K], with sum 1; zero for what a block does not draft."""
    k = torch.arange(DRAFTS)
    weight = torch.exp(-k / GAMMA) * (k < blocks.drafts[..., None])
    return weight / weight.sum()


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy in nats of ``labels [B, A, K]``, [B, A, K]."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view_as(labels)


def dflash_loss(logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Weighted cross-entropy."""
    return (token_losses(logits, labels) * weight).sum()


def dspark_loss(
    logits: Tensor, confidence: Tensor, labels: Tensor, teacher: Tensor, weight: Tensor
) -> Tensor:
    """The three losses of a drafter with Markov and confidence heads.

    A draft from q is accepted with probability 1 - TV(p, q), half the L1 distance; that is the confidence's label.
    """
    distance = (teacher.softmax(-1) - logits.softmax(-1)).abs().sum(-1)
    accepted = 1 - distance.detach() / 2
    judged = F.binary_cross_entropy_with_logits(confidence, accepted, reduction="none")
    parts = token_losses(logits, labels), distance, judged
    total = sum(factor * part for factor, part in zip(DSPARK_WEIGHTS, parts, strict=True))
    return (total * weight).sum()


def loss_of_drafter(drafter: Drafter, trunk: model.Trunk, blocks: Blocks, teacher: Teacher) -> Tensor:
    """The loss of the drafter's family over a batch of blocks."""
    hidden = drafter(teacher.taps, blocks, trunk.backbone.embeddings.weight)
    previous, labels = blocks.tokens(0, DRAFTS), blocks.tokens(1, DRAFTS)
    logits = drafter.logits(hidden, previous, trunk.lm_head.weight.to(teacher.taps.dtype))
    if not drafter.spec.confidence:
        return dflash_loss(logits, labels, weights(blocks))
    # It judges what drafting makes of the hidden states, and does not shape them: there is little room in them.
    confidence = drafter.confidence(hidden.detach(), previous)
    return dspark_loss(logits, confidence, labels, teacher.logits, weights(blocks))


def train_drafters(
    trunk: model.Trunk,
    drafters: nn.ModuleDict,
    plan: train.Plan,
    rows,
    valid: dict[str, Blocks],
    state_file: Path,
    log: train.Log,
    resume: bool,
    threads: train.Threads,
    compiled: bool,
) -> None:
    """Train all drafters on the same blocks, so that the target runs once for them; they share no parameters."""
    trunk.requires_grad_(False)
    loss_fn = torch.compile(loss_of_drafter) if compiled else loss_of_drafter
    if compiled:
        for layer in trunk.backbone.layers:
            layer.compile()
    latest: list[Tensor] = []

    def loss_of(blocks: Blocks):
        teacher = Teacher.of(trunk, blocks, next(iter(drafters.values())).spec.taps, torch.bfloat16)
        losses = [loss_fn(drafter, trunk, blocks, teacher) for drafter in drafters.values()]
        latest[:] = [loss.detach() for loss in losses]
        return sum(losses), [], [], lambda: train.depth_text(latest)

    @torch.compiler.set_stance("force_eager")  # other shapes; compiling for them takes longer than they do
    def evaluate() -> str:
        return " ".join(
            f"{name} " + "/".join(f"{acceptance_length(trunk, d, some):.2f}" for some in valid.values())
            for name, d in drafters.items()
        )

    run = (plan, drafters, rows, state_file, log, resume, threads)
    train.run_stage(*run, loss_of, evaluate)


@torch.no_grad()
def acceptance_length(trunk: model.Trunk, drafter: Drafter, blocks: Blocks) -> float:
    """Tokens of a verification when greedy drafts are compared with the text: one plus the drafts right in a row.

    Feeding the Markov head the text instead of the drafts is exact as long as all earlier drafts are right.
    """
    teacher = Teacher.of(trunk, blocks, drafter.spec.taps, torch.bfloat16)
    hidden = drafter(teacher.taps, blocks, trunk.backbone.embeddings.weight)
    logits = drafter.logits(hidden, blocks.tokens(0, DRAFTS), trunk.lm_head.weight.bfloat16())
    matches = logits.argmax(-1) == blocks.tokens(1, DRAFTS)
    return 1 + float(matches.float().cumprod(-1).sum(-1).mean())
