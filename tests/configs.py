# SPDX-License-Identifier: Apache-2.0
"""Configurations: those of published models, a tiny one, and random ones."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

Config = dict[str, Any]

NANO_PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
DENSE_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
SUPER_PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
NAMES = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
NEW_NAMES = {**NAMES, "M": "linear_attention", "*": "full_attention"}

COMMON: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
NANO: Config = COMMON | {
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": NANO_PATTERN,
    "intermediate_size": 1856,
    "mamba_num_heads": 64,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "transformers_version": "4.55.4",
}
LIGHTNING: Config = {
    k: v for k, v in NANO.items() if k not in ("hybrid_override_pattern", "torch_dtype", "num_hidden_layers")
} | {
    "dtype": "bfloat16",
    "layers_block_type": [NAMES[c] for c in NANO_PATTERN],
    "max_position_embeddings": 1048576,
    "moe_latent_size": None,
    "moe_shared_expert_overlap": True,
    "mtp_layers_block_type": ["attention", "moe"],
    "num_nextn_predict_layers": 1,
    "transformers_version": "5.5.3",
}
DENSE_8B: Config = COMMON | {
    "attention_head_dim": 128,
    "hidden_size": 4096,
    "hybrid_override_pattern": DENSE_PATTERN,
    "intermediate_size": 21504,
    "mamba_num_heads": 128,
    "max_position_embeddings": 8192,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "transformers_version": "4.48.0.dev0",
}
SUPER: Config = NANO | {
    "eos_token_id": [2, 11],
    "hidden_size": 4096,
    "hybrid_override_pattern": SUPER_PATTERN,
    "mamba_num_heads": 128,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "mtp_hybrid_override_pattern": "*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "num_hidden_layers": 88,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 5.0,
    "quantization_config": {"quant_method": "modelopt"},
}
GENERATION: Config = {
    "_from_model_config": True,
    "bos_token_id": 1,
    "do_sample": True,
    "eos_token_id": [2, 11],
    "pad_token_id": 0,
    "temperature": 1.0,
    "top_p": 0.95,
    "transformers_version": "5.5.3",
}
TINY: Config = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 96,
    "hidden_size": 32,
    "hybrid_override_pattern": "ME*-",
    "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 4,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "intermediate_size": 64,
}


def without(config: Config, *names: str) -> Config:
    return {k: v for k, v in config.items() if k not in names}


sizes = st.integers(1, 64)


@st.composite
def valid_configs(draw: st.DrawFn) -> Config:
    """A configuration with random geometry and random values of the optional fields."""
    groups, expert_groups, kv_heads = draw(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
    group_size = draw(st.integers(2, 8))
    top_groups = draw(st.integers(1, expert_groups))
    low = draw(st.floats(0, 1))
    bias = draw(st.booleans())
    config = TINY | {
        "hybrid_override_pattern": "".join(draw(st.lists(st.sampled_from("ME*-"), min_size=1, max_size=12))),
        "hidden_size": draw(sizes),
        "layer_norm_epsilon": draw(st.floats(1e-8, 1e-3)),
        "tie_word_embeddings": draw(st.booleans()),
        "torch_dtype": draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        "n_groups": groups,
        "mamba_num_heads": groups * draw(sizes),
        "use_bias": bias,
        "mamba_proj_bias": bias,
        "use_conv_bias": draw(st.booleans()),
        "chunk_size": draw(sizes),
        "time_step_limit": [low, low + draw(st.floats(0.1, math.inf))],
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(sizes),
        "n_group": expert_groups,
        "topk_group": top_groups,
        "n_routed_experts": expert_groups * group_size,
        "num_experts_per_tok": draw(st.integers(1, top_groups * group_size)),
        "moe_latent_size": draw(st.none() | sizes),
        "norm_topk_prob": draw(st.booleans()),
        "eos_token_id": draw(st.integers(0, 95) | st.lists(st.integers(0, 95), max_size=3)),
    }
    if draw(st.booleans()):
        mtp = "".join(draw(st.lists(st.sampled_from("E*"), min_size=1, max_size=3)))
        config |= {"num_nextn_predict_layers": draw(st.integers(1, 2)), "mtp_hybrid_override_pattern": mtp}
    return config


ALIASES = {
    "layer_norm_epsilon": ("norm_eps", "rms_norm_eps"),
    "torch_dtype": ("dtype",),
    "n_groups": ("mamba_n_groups", "mamba_num_groups"),
    "ssm_state_size": ("mamba_state_dim",),
    "num_key_value_heads": ("num_query_groups",),
    "conv_kernel": ("mamba_d_conv",),
    "use_conv_bias": ("mamba_conv_bias",),
    "time_step_limit": ("mamba_dt_limit",),
    "chunk_size": ("mamba_chunk_size",),
    "head_dim": ("attention_head_dim",),
    "n_routed_experts": ("num_local_experts",),
}
