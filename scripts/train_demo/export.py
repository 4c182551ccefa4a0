# SPDX-License-Identifier: Apache-2.0
"""Write the checkpoint in the released models' format and check that transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path

import model
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

KINDS = {"M": "mamba", "E": "moe", "*": "attention"}


def keeps_fp32(name: str) -> bool:
    """Whether the released checkpoints store a tensor in FP32: selection biases and the trunk's routers."""
    is_trunk = name.startswith("backbone.")
    return name.endswith("e_score_correction_bias") or (is_trunk and name.endswith(".gate.weight"))


def checkpoint_tensors(trunk: model.Trunk, mtp: model.Mtp) -> dict[str, Tensor]:
    """Tensors by released name: one per expert; the trunk's routers and all biases FP32, the rest BF16."""
    state = {**trunk.state_dict(), **{f"mtp.{k}": v for k, v in mtp.state_dict().items()}}
    out = {}
    for name, value in state.items():
        value = value.detach().to(torch.float32 if keeps_fp32(name) else torch.bfloat16)
        if ".experts." in name:
            prefix, _, projection = name.rpartition(".")
            for expert, weight in enumerate(value):
                out[f"{prefix}.{expert}.{projection}.weight"] = weight.contiguous()
        else:
            out[name] = value.contiguous()
    return out


@torch.no_grad()
def round_to_checkpoint(*modules: torch.nn.Module) -> None:
    """Round weights in place to what the checkpoint stores, so that measurements are of the file."""
    for module in modules:
        for name, value in module.state_dict().items():
            if not keeps_fp32(name):
                value.copy_(value.bfloat16())


def config(spec: model.Spec) -> dict:
    """config.json in the released checkpoints' spelling."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "chunk_size": 64,
        "conv_kernel": spec.conv_kernel,
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "expand": 2,
        "head_dim": spec.head_dim,
        "hidden_dropout": 0.0,
        "hidden_size": spec.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": spec.moe_intermediate_size,
        "layer_norm_epsilon": spec.eps,
        "layers_block_type": [KINDS[kind] for kind in spec.pattern],
        "mamba_head_dim": spec.mamba_head_dim,
        "mamba_hidden_act": "silu",
        "mamba_num_heads": spec.mamba_num_heads,
        "mamba_proj_bias": False,
        "mamba_ssm_cache_dtype": "float32",
        "max_position_embeddings": 8192,
        "mlp_bias": False,
        "mlp_hidden_act": "relu2",
        "model_type": "nemotron_h",
        "moe_intermediate_size": spec.moe_intermediate_size,
        "moe_latent_size": None,
        "moe_shared_expert_intermediate_size": spec.moe_shared_expert_intermediate_size,
        "moe_shared_expert_overlap": True,
        "mtp_layers_block_type": ["attention", "moe"],
        "n_group": 1,
        "n_groups": spec.n_groups,
        "n_routed_experts": spec.n_routed_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": spec.num_attention_heads,
        "num_experts_per_tok": spec.num_experts_per_tok,
        "num_hidden_layers": len(spec.pattern),
        "num_key_value_heads": spec.num_key_value_heads,
        "num_logits_to_keep": 1,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "partial_rotary_factor": 1.0,
        "rescale_prenorm_residual": True,
        "residual_in_fp32": False,
        "rope_theta": 10000,
        "routed_scaling_factor": spec.routed_scaling_factor,
        "sliding_window": None,
        "ssm_state_size": spec.ssm_state_size,
        "tie_word_embeddings": False,
        "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")],
        "time_step_max": 0.1,
        "time_step_min": 0.001,
        "topk_group": 1,
        "torch_dtype": "bfloat16",
        "use_bias": False,
        "use_cache": True,
        "use_conv_bias": True,
        "vocab_size": spec.vocab_size,
    }


def save(trunk: model.Trunk, mtp: model.Mtp, out: Path) -> None:
    """Write weights, config.json and generation_config.json."""
    save_file(checkpoint_tensors(trunk, mtp), out / "model.safetensors", {"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    (out / "config.json").write_text(json.dumps(config(trunk.spec), indent=2) + "\n", "utf-8")
    generation = {
        "bos_token_id": 1,
        "do_sample": True,
        "eos_token_id": [2, 11],
        "pad_token_id": 0,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")


def load_trunk(path: Path) -> model.Trunk:
    """The trunk of a checkpoint that :func:`save` wrote, FP32."""
    trunk, stored = model.Trunk(model.Spec()), load_file(path / "model.safetensors")
    state = {}
    for name in trunk.state_dict():
        if ".experts." in name:
            prefix, _, projection = name.rpartition(".")
            experts = range(trunk.spec.n_routed_experts)
            state[name] = torch.stack([stored[f"{prefix}.{e}.{projection}.weight"].float() for e in experts])
        else:
            state[name] = stored[name].float()
    trunk.load_state_dict(state)
    return trunk


def load_reference(path: Path):
    """The checkpoint in transformers, FP32; fails on missing or mismatched tensors."""
    from transformers import NemotronHForCausalLM

    reference, info = NemotronHForCausalLM.from_pretrained(
        path, dtype=torch.float32, output_loading_info=True
    )
    left = {k: v for k, v in info.items() if v and k != "unexpected_keys"}
    unexpected = [k for k in info["unexpected_keys"] if not k.startswith("mtp.")]
    assert not left, left
    assert not unexpected, unexpected
    for layer in reference.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            # transformers takes time_step_min as the lower bound and ignores the config's limits.
            layer.mixer.time_step_limit = (0.0, float("inf"))
    return reference.eval()


@torch.no_grad()
def reference_loss(reference, rows: Tensor) -> float:
    """Mean loss in nats of rows [R, L + 1] in transformers."""
    total = 0.0
    for row in rows.split(4):
        logits = reference(row[:, :-1], use_cache=False).logits
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten())) * len(
            row
        )
    return total / len(rows)
