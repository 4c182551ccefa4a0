# SPDX-License-Identifier: Apache-2.0
"""Optimiser: Muon for the matrices of the layers, AdamW for everything else."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def orthogonalise(update: Tensor, steps: int = 5) -> Tensor:
    """Nearest semi-orthogonal matrix to each of [..., rows, columns], by quintic Newton-Schulz in BF16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = update.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised; stacked matrices are treated one by one."""

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        """Apply one update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                buffer = self.state[p].setdefault("buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(buffer, group["momentum"]))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-group["lr"] * max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5)


def build(module: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Optimisers over all trainable parameters of ``module``."""
    matrices, others = [], []
    apart = ("embeddings", "lm_head", "gate.", "conv1d", "markov_head", "confidence_head")
    for name, p in module.named_parameters():
        is_matrix = p.ndim >= 2 and not any(s in name for s in apart)
        (matrices if is_matrix else others).append(p)
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True)
    return [Muon(matrices, muon_lr, decay=0.1), adam]


def schedule(step: int, steps: int, warmup: int, decay: int) -> float:
    """Learning-rate factor: linear warm-up, constant, linear decay to zero over the last ``decay`` steps."""
    return min(1.0, (step + 1) / warmup, (steps - step) / decay)
