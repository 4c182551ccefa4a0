# SPDX-License-Identifier: Apache-2.0
"""transformers as a contender of serving.py: `generate` on static batches of as many requests as there are streams.

A batch ends when its longest answer does, and the next one begins then: what a stream asks for meanwhile waits. The
weights are those of the directory, or random where it has none, in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _serving import Job, clock, report
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from nemo_build.runtime.bench.load import Trace


class Watch(StoppingCriteria):
    """Notes when each token comes, and ends each answer at its length."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Called after each token of a batch; which rows are done."""
        now = clock()
        wanted = [t.request.params.max_tokens for t in self._traces]
        for trace, most, token in zip(self._traces, wanted, input_ids[:, -1].tolist(), strict=True):
            if len(trace.times) < most:
                trace.times.append(now)
                trace.tokens.append(token)
        return torch.tensor([len(t.times) >= most for t, most in zip(self._traces, wanted, strict=True)])


def load(directory: Path) -> Any:
    """The model; its time steps are not clamped, which transformers does in its prompt path alone."""
    if any(directory.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    else:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(directory), dtype=torch.bfloat16
            )
        model = model.to_empty(device="cpu")
        _fill(model)
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.0, math.inf)
    return model.eval()


def _fill(model: Any) -> None:
    """Random weights of a plausible size; large ones repeat a block, which is faster than drawing them all."""
    block = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            flat, values = tensor.view(-1), block.to(tensor.dtype)
            for start in range(0, len(flat), len(values)):
                part = flat[start : start + len(values)]
                part.copy_(values[: len(part)])
            if "norm" in name or name.endswith((".A_log", ".D")):
                tensor += 1


@torch.inference_mode()
def generate(model: Any, traces: Sequence[Trace]) -> None:
    """One batch, padded on the left."""
    prompts = [t.request.tokens for t in traces]
    width = max(map(len, prompts))
    ids = torch.tensor([(0,) * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    longest = max(t.request.params.max_tokens for t in traces)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=[Watch(traces)])


def closed_loop(model: Any, traces: Sequence[Trace], streams: int) -> None:
    """All requests in batches; a stream sends its next one when its last one has ended."""
    free = [clock()] * streams
    for start in range(0, len(traces), streams):
        batch = traces[start : start + streams]
        for trace, since in zip(batch, free, strict=False):
            trace.sent = since
        generate(model, batch)
        free = [t.times[-1] for t in batch]


def main() -> None:
    job = Job.read()
    torch.set_num_threads(job.threads)
    model = load(Path(job.model))
    closed_loop(model, job.warm_up(), job.streams)
    traces = job.traces()
    closed_loop(model, traces, job.streams)
    report(traces)


if __name__ == "__main__":
    main()
