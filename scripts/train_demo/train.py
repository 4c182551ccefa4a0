# SPDX-License-Identifier: Apache-2.0
"""Training loops for the trunk and for the MTP module, with resumable state."""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import data
import model
import numpy as np
import optim
import torch
from torch import Tensor

BALANCE_RATE = 5e-3
DEPTH_WEIGHTS = (1.0, 0.8, 0.6, 0.5)


@dataclass(frozen=True)
class Plan:
    """One training stage."""

    name: str
    steps: int
    batch: int
    length: int
    warmup: int
    decay: int
    muon_lr: float
    adam_lr: float


class Log:
    """Prints lines and appends them to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, line: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {line}"
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(line + "\n")


def last_loss(path: Path, name: str) -> float:
    """The last training loss that the log holds for a stage."""
    return float(re.findall(rf"{name} step \d+/\d+ loss ([\d.]+)", path.read_text("utf-8"))[-1])


class Threads:
    """One thread while other processes use a core: two in step would run at the slower one's pace."""

    def __init__(self, most: int, share: bool) -> None:
        self.most, self.share = most, share
        self.before = self.clocks()

    def clocks(self) -> tuple[float, float, float]:
        """Seconds of wall time, of CPU time of the processes that matter, and of this process among them.

        A process with lowered priority need not yield to its like, so it watches normal ones only.
        """
        ticks = [int(x) for x in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        if os.nice(0) > 0:
            return time.monotonic(), ticks[0] / os.sysconf("SC_CLK_TCK"), 0.0
        busy = sum(ticks) - ticks[3] - ticks[4]
        return time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), time.process_time()

    def adjust(self) -> None:
        """Choose the thread count from what happened since the last call."""
        if not self.share or time.monotonic() - self.before[0] < 2:
            return
        now = self.clocks()
        wall, busy, own = (b - a for a, b in zip(self.before, now, strict=True))
        torch.set_num_threads(1 if (busy - own) / wall > 0.3 else self.most)
        self.before = now


class Rows:
    """Endless training rows; which rows a step gets depends on the seed and the step only."""

    def __init__(self, tokenizer, corpus: data.Corpus, length: int, seed: int) -> None:
        self.tokenizer, self.entries, self.length, self.seed = tokenizer, corpus.train_entries, length, seed
        self.documents = data.encode(tokenizer, corpus.train["docs"] + corpus.train["code"])

    def batches(self, batch: int, skip: int) -> Iterator[Tensor]:
        """Batches int64 [batch, length + 1], without the first ``skip`` of them."""
        epoch, rest = 0, np.zeros((0, self.length + 1), np.int64)
        while True:
            rows = data.epoch_rows(
                self.tokenizer, self.documents, self.entries, self.length, self.seed, epoch
            )
            rest, epoch = np.concatenate([rest, rows]), epoch + 1
            while len(rest) >= batch:
                if skip:
                    skip -= 1
                else:
                    yield torch.from_numpy(rest[:batch])
                rest = rest[batch:]


def save_state(path: Path, **state) -> None:
    """Write a resumable state; an interruption leaves the previous one."""
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.replace(path)


def set_rates(optimisers: list[torch.optim.Optimizer], plan: Plan, step: int) -> float:
    """Set the learning rates for ``step``; return the factor applied."""
    factor = optim.schedule(step, plan.steps, plan.warmup, plan.decay)
    for optimiser, rate in zip(optimisers, (plan.muon_lr, plan.adam_lr), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = rate * factor
    return factor


@torch.no_grad()
def balance(routers: list[model.Router], loads: list[Tensor], rate: float) -> float:
    """Move each selection bias against its expert's load; return the largest load over the mean, 0 without any."""
    for router, load in zip(routers, loads, strict=True):
        router.e_score_correction_bias += rate * torch.sign(load.mean() - load)
    return max((float(load.max() / load.mean()) for load in loads), default=0.0)


def run_stage(
    plan: Plan,
    module: torch.nn.Module,
    rows: Rows,
    state_file: Path,
    log: Log,
    resume: bool,
    threads: Threads,
    loss_of,
    evaluate,
) -> None:
    """Train ``module`` by ``plan``: ``loss_of(batch)`` gives (loss, routers, loads, text to log).

    Whatever has the ``batches`` of :class:`Rows` will do for ``rows``; what a batch is, ``loss_of`` knows.
    """
    optimisers = optim.build(module, plan.muon_lr, plan.adam_lr)
    first = 0
    if resume and state_file.exists():
        state = torch.load(state_file, weights_only=True)
        module.load_state_dict(state["module"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        first = state["step"]
        log(f"{plan.name}: resumed at step {first}")
    batches, began, mean = rows.batches(plan.batch, first), time.monotonic(), 0.0
    for step in range(first, plan.steps):
        threads.adjust()
        factor = set_rates(optimisers, plan, step)
        loss, routers, loads, text = loss_of(next(batches))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        worst, mean = balance(routers, loads, BALANCE_RATE * factor), mean + loss.item()
        if (step + 1) % 20 == 0:
            speed = 20 * plan.batch * plan.length / (time.monotonic() - began)
            began = time.monotonic()
            log(
                f"{plan.name} step {step + 1}/{plan.steps} loss {mean / 20:.4f} {text()}norm {norm:.2f} "
                f"load {worst:.2f} rate {optimisers[0].param_groups[0]['lr']:.4f} {speed:.0f} tok/s "
                f"{torch.get_num_threads()} threads"
            )
            mean = 0.0
        if (step + 1) % 200 == 0 or step + 1 == plan.steps:
            save_state(
                state_file,
                step=step + 1,
                module=module.state_dict(),
                optimisers=[o.state_dict() for o in optimisers],
            )
            log(f"{plan.name} step {step + 1} valid {evaluate()}")


# ---------------------------------------------------------------------------------------------------
# trunk


def train_trunk(
    trunk: model.Trunk,
    plan: Plan,
    rows: Rows,
    valid: dict[str, np.ndarray],
    state_file: Path,
    log: Log,
    resume: bool,
    threads: Threads,
    compiled: bool,
) -> None:
    """Next-token training of the whole trunk in BF16 with FP32 master weights."""
    token_loss = torch.compile(model.token_loss) if compiled else model.token_loss
    if compiled:
        for layer in trunk.backbone.layers:
            layer.compile()

    def loss_of(ids: Tensor):
        hidden, loads = trunk.backbone(ids[:, :-1], torch.bfloat16)
        return token_loss(trunk, hidden, ids[:, 1:], torch.bfloat16), trunk.routers(), loads, lambda: ""

    def evaluate() -> str:
        losses = valid_losses(trunk, {kind: some[:16] for kind, some in valid.items()}, torch.bfloat16)
        return " ".join(f"{kind} {loss:.4f}" for kind, loss in losses.items())

    run_stage(plan, trunk, rows, state_file, log, resume, threads, loss_of, evaluate)


@torch.no_grad()
def valid_losses(trunk: model.Trunk, valid: dict[str, np.ndarray], dtype: torch.dtype) -> dict[str, float]:
    """Mean loss in nats per token by kind of text."""
    losses = {}
    for kind, rows in valid.items():
        total = 0.0
        for row in torch.from_numpy(rows).split(4):
            hidden, _ = trunk.backbone(row[:, :-1], dtype)
            total += model.token_loss(trunk, hidden, row[:, 1:], dtype).item() * len(row)
        losses[kind] = total / len(rows)
    return losses


# ---------------------------------------------------------------------------------------------------
# MTP


def soft_loss(trunk: model.Trunk, hidden: Tensor, teacher: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross-entropy of the draft against teacher probabilities [B, L, V]."""
    logits = trunk.lm_head(hidden.to(dtype)).float()
    return -(teacher.float() * logits.log_softmax(-1)).sum(-1).mean()


def train_mtp(
    trunk: model.Trunk,
    mtp: model.Mtp,
    plan: Plan,
    rows: Rows,
    valid: dict[str, np.ndarray],
    state_file: Path,
    log: Log,
    resume: bool,
    threads: Threads,
    compiled: bool,
) -> None:
    """Distil the frozen trunk's distributions into the module, unrolled over the depths.

    At depth d the anchor p joins the token at p + d with its chain's hidden and predicts the token at
    p + d + 1; its teacher is the trunk's distribution at p + d.
    """
    trunk = copy.deepcopy(trunk).requires_grad_(False)
    loss_fn = torch.compile(soft_loss) if compiled else soft_loss
    if compiled:
        for module in (mtp, *trunk.backbone.layers):
            module.compile()
    latest: list[float] = []

    def loss_of(ids: Tensor):
        ids = ids[:, :-1]
        with torch.no_grad():
            hidden, _ = trunk.backbone(ids, torch.bfloat16)
            teacher = trunk.lm_head(hidden.bfloat16()).float().softmax(-1).bfloat16()
            embedded = trunk.backbone.embeddings(ids)
        total, past, load, losses, length = 0.0, [], 0, [], ids.shape[1]
        for depth, weight in enumerate(DEPTH_WEIGHTS, 1):
            hidden, entry, used = mtp(embedded.roll(-depth, 1), hidden, past, torch.bfloat16)
            past, load = [*past, entry], load + used
            # The last anchors have no token ``depth`` further on; nothing before them sees them.
            loss = loss_fn(
                trunk, hidden[:, : length - 4], teacher.roll(-depth, 1)[:, : length - 4], torch.bfloat16
            )
            total, losses = total + weight * loss, [*losses, loss.detach()]
        latest[:] = losses
        return total, [mtp.layers[1].mixer.gate], [load], lambda: depth_text(latest)

    def evaluate() -> str:
        return " ".join(
            f"{kind} " + "/".join(f"{x:.3f}" for x in agreement(trunk, mtp, some[:16]))
            for kind, some in valid.items()
        )

    run_stage(plan, mtp, rows, state_file, log, resume, threads, loss_of, evaluate)


def depth_text(losses: list[Tensor]) -> str:
    """The latest loss of each depth."""
    return "(" + " ".join(f"{float(x):.3f}" for x in losses) + ") "


@torch.no_grad()
def draft_matches(
    trunk: model.Trunk, mtp: model.Mtp, ids: Tensor, depths: int = len(DEPTH_WEIGHTS)
) -> Tensor:
    """Whether the draft at each depth equals the text, bool [B, L, depths]; True needs ids[p + depth + 1].

    Feeding the text instead of the drafts is exact as long as all earlier drafts matched, which is what a
    chain of acceptances needs.
    """
    hidden, _ = trunk.backbone(ids, torch.float32)
    embedded, past, matches = trunk.backbone.embeddings(ids), [], []
    for depth in range(1, depths + 1):
        hidden, entry, _ = mtp(embedded.roll(-depth, 1), hidden, past, torch.float32)
        past.append(entry)
        matches.append(trunk.lm_head(hidden).argmax(-1) == ids.roll(-depth - 1, 1))
    return torch.stack(matches, -1)


@torch.no_grad()
def agreement(trunk: model.Trunk, mtp: model.Mtp, rows: np.ndarray) -> list[float]:
    """Per depth, how often the draft's choice is the trunk's choice, on true text."""
    ids = torch.from_numpy(rows[:, :-1])
    hidden, _ = trunk.backbone(ids, torch.bfloat16)
    choice = trunk.lm_head(hidden.bfloat16()).argmax(-1)
    embedded, past, shares = trunk.backbone.embeddings(ids), [], []
    for depth in range(1, len(DEPTH_WEIGHTS) + 1):
        hidden, entry, _ = mtp.forward(embedded.roll(-depth, 1), hidden, past, torch.bfloat16)
        past.append(entry)
        draft = trunk.lm_head(hidden.bfloat16()).argmax(-1)
        shares.append(float((draft == choice.roll(-depth, 1))[:, :-4].float().mean()))
    return shares


def rounds(matches: list[list[bool]]) -> list[int]:
    """Tokens per verification when drafting greedily along one text: accepted drafts plus one."""
    position, lengths = 0, []
    while position < len(matches):
        row = matches[position]
        accepted = next((i for i, ok in enumerate(row) if not ok), len(row))
        lengths.append(accepted + 1)
        position += accepted + 1
    return lengths
