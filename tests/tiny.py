# SPDX-License-Identifier: Apache-2.0
"""Small random Nemotron-H models in transformers, as checkpoints and as exported sessions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import NemotronHConfig, NemotronHForCausalLM

from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.export.exporter import export_bundle

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "intermediate_size": 80,
    "ssm_state_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 32,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}

KINDS: dict[str, dict[str, Any]] = {
    "hybrid": {"hybrid_override_pattern": "MEM*E-"},
    "dense": {"hybrid_override_pattern": "M-M*-"},
    "grouped-routing": {
        "hybrid_override_pattern": "*EME",
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": False,
    },
    "latent-experts": {"hybrid_override_pattern": "M*E", "moe_latent_size": 32},
    "biases": {
        "hybrid_override_pattern": "M*E-",
        "use_bias": True,
        "mlp_bias": True,
        "mamba_proj_bias": True,
    },
    "no-conv-bias-one-group": {"hybrid_override_pattern": "M*M", "use_conv_bias": False, "n_groups": 1},
    "tied": {"hybrid_override_pattern": "M*E", "tie_word_embeddings": True},
}
"""Configurations that between them have every kind of block and every option that changes the graph."""


def reference_model(seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any) -> NemotronHForCausalLM:
    """A random model.

    The reference clamps time steps in its chunked path only, and to the initialisation range instead of
    ``time_step_limit``; the clamp is set to what the configuration says, so that both of its paths agree.
    """
    model = NemotronHForCausalLM(NemotronHConfig(**{**BASE, **config})).to(dtype).eval()
    randomize(model, seed)
    fix_time_step_clamp(model)
    return model


@torch.no_grad()
def randomize(module: torch.nn.Module, seed: int) -> None:
    """Random weights of a size at which every part of a model shows in its logits."""
    torch.manual_seed(seed)
    for name, p in module.named_parameters():
        if p.ndim >= 2:
            p.copy_(torch.randn_like(p) * (p.shape[-1] ** -0.5))
        elif name.endswith("dt_bias"):
            p.copy_(torch.randn_like(p) - 2)
        elif name.endswith("A_log"):
            p.copy_(torch.rand_like(p) * 2)
        elif name.endswith("bias"):
            p.copy_(torch.randn_like(p) * 0.2)
        else:
            p.copy_(1 + torch.randn_like(p) * 0.2)
    for name, b in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            b.copy_(torch.randn_like(b) * 0.1)


def fix_time_step_clamp(model: NemotronHForCausalLM) -> None:
    """Make every mixer clamp to the configuration's ``time_step_limit``."""
    low, high = (float(v) for v in model.config.time_step_limit)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (low, high)


def save_checkpoint(model: NemotronHForCausalLM, directory: Path) -> None:
    """Save as a checkpoint. Transformers never ties this model's head; where the configuration asks for it,
    the model's head becomes the embedding table and leaves the file.
    """
    if model.config.tie_word_embeddings:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embeddings.weight)
    model.save_pretrained(directory)
    if model.config.tie_word_embeddings:
        path = directory / "model.safetensors"
        tensors = load_file(path)
        del tensors["lm_head.weight"]
        save_file(tensors, path, metadata={"format": "pt"})


def open_exported(directory: Path, out: Path, **sizes: Any) -> OrtSession:
    """Export a checkpoint and open its target graph in plain ONNX Runtime."""
    export_bundle(directory, out)
    return OrtSession(out / "target.onnx", **{"slots": 4, "context": 512, **sizes})


def reference_logits(model: NemotronHForCausalLM, tokens: list[int]) -> np.ndarray:
    """Logits ``[L, V]`` of one sequence in one shot, float32."""
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()


def feed(
    session: OrtSession, rows: dict[int, list[int]], past: dict[int, int], **kwargs: Any
) -> dict[int, np.ndarray]:
    """One step with all logits: slot -> new tokens; `past` is read and advanced. Returns slot -> ``[n, V]``."""
    slots = list(rows)
    batch = StepBatch.of_rows(
        [rows[s] for s in slots], past=[past.get(s, 0) for s in slots], slots=slots, logits="all", **kwargs
    )
    logits = session.step(batch).logits
    out, at = {}, 0
    for slot in slots:
        n = len(rows[slot])
        out[slot] = logits[at : at + n]
        at += n
        past[slot] = past.get(slot, 0) + n
    return out
