# SPDX-License-Identifier: Apache-2.0
"""Block drafters in torch, without caches, and their checkpoints in the released format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from nemo_build.plugins.codecs import nvfp4

Config = dict[str, Any]

COMMON: Config = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "has_lm_head": False,
    "hidden_act": "silu",
    "hidden_size": 48,
    "mask_token_id": 90,
    "max_position_embeddings": 1 << 20,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "pard_token": 90,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "train_embed_tokens": False,
    "transformers_version": "5.5.3",
    "use_cache": False,
    "vocab_size": 96,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 32}

CONFIGS: dict[str, Config] = {
    # As released: everything is seen both ways, YaRN.
    "dflash": COMMON
    | {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 3, 5]},
        "eagle_aux_hidden_state_layer_ids": [2, 4, 6],
        "has_embed_tokens": True,
        "head_dim": 16,
        "intermediate_size": 80,
        "layer_types": ["full_attention"] * 2,
        "num_attention_heads": 6,
        "num_aux_layers": 3,
        "num_key_value_heads": 2,
        "rope_parameters": YARN,
        "sample_from_anchor": False,
    },
    # As released: causal, sliding, with sinks and a Markov head.
    "dspark": COMMON
    | {
        "architectures": ["Qwen3DSparkModel"],
        "attention_sink_bias": True,
        "block_size": 8,
        "dflash_config": {
            "attention_sink_bias": True,
            "causal": True,
            "mask_token_id": 90,
            "sample_from_anchor": False,
            "swa_window_size": 9,
            "target_layer_ids": [1, 3, 5],
            "use_swa": True,
        },
        "dflash_query_causal": True,
        "dspark_bonus_anchor": True,
        "dspark_fixup_head_type": "markov",
        "dspark_markov_rank": 32,
        "has_embed_tokens": True,
        "head_dim": 16,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention"] * 2,
        "markov_head_type": "vanilla",
        "markov_rank": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": None,
        "rope_theta": 10000,
        "sliding_window": 9,
        "target_layer_ids": [1, 3, 5],
    },
    # What else there is: odd widths, mixed layers seen both ways, the target's embeddings, an own head, confidence.
    "dspark-odd": COMMON
    | {
        "architectures": ["Qwen3DSparkModel"],
        "attention_sink_bias": True,
        "block_size": 5,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "has_embed_tokens": False,
        "has_lm_head": True,
        "head_dim": 10,
        "intermediate_size": 37,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "markov_head_type": "vanilla",
        "markov_rank": 5,
        "num_attention_heads": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 3,
        "rope_theta": 500.0,
        "sliding_window": 4,
        "target_layer_ids": [4, 0],
    },
}


class DraftReference(torch.nn.Module):
    """A drafter with random weights; its tensors' names are those of the release.

    Args:
        config: The drafter's ``config.json``.
        embeddings: The target's, ``[V, H]``.
        head: The target's output head, ``[V, H]``.
        seed: Of the weights.
    """

    def __init__(self, config: Config, embeddings: torch.Tensor, head: torch.Tensor, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        inner = config.get("dflash_config", {})
        self.taps: list[int] = config.get("target_layer_ids") or inner["target_layer_ids"]
        self.causal = bool(inner.get("causal", False))
        self.target_tables = {"embed_tokens.weight": embeddings, "lm_head.weight": head}
        self.rotary = _rotary(config)
        torch.manual_seed(seed)
        self.w = {name: _random(name, shape) for name, shape in self.shapes().items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors of the checkpoint."""
        c = self.config
        h, v, d, inner = (c[n] for n in ("hidden_size", "vocab_size", "head_dim", "intermediate_size"))
        q, kv, rank = c["num_attention_heads"] * d, c["num_key_value_heads"] * d, c.get("markov_rank", 0)
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, len(self.taps) * h),
            "hidden_norm.weight": (h,),
        }
        for i in range(c["num_hidden_layers"]):
            layer = {
                "input_layernorm.weight": (h,),
                "post_attention_layernorm.weight": (h,),
                "self_attn.q_proj.weight": (q, h),
                "self_attn.k_proj.weight": (kv, h),
                "self_attn.v_proj.weight": (kv, h),
                "self_attn.o_proj.weight": (h, q),
                "self_attn.q_norm.weight": (d,),
                "self_attn.k_norm.weight": (d,),
                "mlp.gate_proj.weight": (inner, h),
                "mlp.up_proj.weight": (inner, h),
                "mlp.down_proj.weight": (h, inner),
            }
            if c.get("attention_sink_bias"):
                layer["self_attn.attention_sink_bias"] = (c["num_attention_heads"],)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes["norm.weight"] = (h,)
        if c.get("has_embed_tokens"):
            shapes["embed_tokens.weight"] = (v, h)
        if c.get("has_lm_head"):
            shapes["lm_head.weight"] = (v, h)
        if rank:
            shapes |= {f"markov_head.markov_w{i}.weight": (v, rank) for i in (1, 2)}
        if c.get("enable_confidence_head"):
            shapes |= {"confidence_head.proj.weight": (1, h + rank), "confidence_head.proj.bias": (1,)}
        return shapes

    @torch.no_grad()
    def block(self, taps: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A block ``[L]`` behind a context ``taps [P, n*H]``: logits ``[L, V]`` and hidden states ``[L, H]``."""
        context = self.norm(taps @ self.w["fc.weight"].T, "hidden_norm")
        x = self._table("embed_tokens.weight")[tokens]
        for i in range(self.config["num_hidden_layers"]):
            layer = f"layers.{i}"
            x = x + self._attention(i, context, self.norm(x, f"{layer}.input_layernorm"))
            normed = self.norm(x, f"{layer}.post_attention_layernorm")
            gate, up = (normed @ self.w[f"{layer}.mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            x = x + torch.nn.functional.silu(gate) * up @ self.w[f"{layer}.mlp.down_proj.weight"].T
        hidden = self.norm(x, "norm")
        return hidden @ self._table("lm_head.weight").T, hidden

    @torch.no_grad()
    def markov(
        self, previous: torch.Tensor, base: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits ``[R, V]`` after the tokens ``previous [R]``, and the confidence ``[R]``."""
        vectors = self.w["markov_head.markov_w1.weight"][previous]
        logits = base + vectors @ self.w["markov_head.markov_w2.weight"].T
        if "confidence_head.proj.weight" not in self.w:
            return logits, None
        weight, bias = (self.w[f"confidence_head.proj.{n}"] for n in ("weight", "bias"))
        return logits, torch.sigmoid(torch.cat([hidden, vectors], -1) @ weight.T + bias)[:, 0]

    def _attention(self, i: int, context: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        c, p = self.config, f"layers.{i}.self_attn"
        heads, d, past = c["num_attention_heads"], c["head_dim"], len(context)
        group = heads // c["num_key_value_heads"]
        both = torch.cat([context, x])
        q = self.norm((x @ self.w[f"{p}.q_proj.weight"].T).view(len(x), heads, d), f"{p}.q_norm")
        k = self.norm((both @ self.w[f"{p}.k_proj.weight"].T).view(len(both), -1, d), f"{p}.k_norm")
        v = (both @ self.w[f"{p}.v_proj.weight"].T).view(len(both), -1, d)
        positions = torch.arange(len(both))
        q, k = self.rotate(q, positions[past:]), self.rotate(k, positions)
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        scores = torch.einsum("lhd,mhd->hlm", q, k) * d**-0.5
        distance = positions[past:, None] - positions[None]
        hidden = distance < 0 if self.causal else torch.zeros_like(distance, dtype=torch.bool)
        if c.get("layer_types", [])[i] == "sliding_attention":
            hidden = hidden | (distance >= c["sliding_window"])
        scores = scores.masked_fill(hidden, float("-inf"))
        if c.get("attention_sink_bias"):
            sinks = self.w[f"{p}.attention_sink_bias"].view(heads, 1, 1).expand(-1, len(x), 1)
            weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        y = torch.einsum("hlm,mhd->lhd", weights, v).reshape(len(x), heads * d)
        return y @ self.w[f"{p}.o_proj.weight"].T

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """``x [L, heads, D]`` turned as transformers turns it, in float32."""
        cos, sin = self.rotary(x, positions[None])
        half = x.shape[-1] // 2
        cos, sin = cos[0, :, None, :half], sin[0, :, None, :half]
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """RMSNorm over the last axis."""
        scaled = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled * self.w[f"{name}.weight"]

    def _table(self, name: str) -> torch.Tensor:
        return self.w[name] if name in self.w else self.target_tables[name]


def _rotary(config: Config) -> Qwen3RotaryEmbedding:
    """Transformers' rotary positions of a drafter."""
    rope = config.get("rope_parameters") or {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    made = Qwen3Config(
        head_dim=config["head_dim"],
        num_attention_heads=config["num_attention_heads"],
        max_position_embeddings=config["max_position_embeddings"],
        rope_parameters=dict(rope),
    )
    return Qwen3RotaryEmbedding(made)


def save_draft(
    reference: DraftReference,
    directory: Path,
    *,
    dtype: torch.dtype = torch.float32,
    packed: tuple[str, ...] = (),
) -> None:
    """Write a checkpoint, and give the reference the values that are in it.

    Args:
        reference: The drafter.
        directory: Where to.
        dtype: Of what is not packed.
        packed: Parts of the names of the projections that are stored in NVFP4, without activation scales.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, value in reference.w.items():
        stem = name.removesuffix(".weight")
        if any(part in stem for part in packed):
            encoded = nvfp4.encode(value.numpy(), four_over_six=True)
            tensors[name] = torch.from_numpy(encoded.codes)
            tensors[f"{stem}.weight_scale"] = torch.from_numpy(encoded.scales).view(torch.float8_e4m3fn)
            tensors[f"{stem}.weight_scale_2"] = torch.tensor(float(encoded.scale_2))
            reference.w[name] = torch.from_numpy(encoded.decode())
        else:
            tensors[name] = value.to(dtype)
            reference.w[name] = tensors[name].float()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(reference.config))


def save_drafters(directory: Path) -> dict[str, Path]:
    """Checkpoints of both kinds of drafter for the tiny checkpoint, some of their modules in NVFP4."""
    for name, packed in (("dflash", ("fc", "mlp")), ("dspark", ("fc", "mlp", "markov_w2"))):
        reference = DraftReference(CONFIGS[name], torch.zeros(96, 48), torch.zeros(96, 48))
        save_draft(reference, directory / name, dtype=torch.bfloat16, packed=packed)
    return {name: directory / name for name in ("dflash", "dspark")}


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if "norm" in name:
        return 1 + torch.randn(shape) * 0.2
    if len(shape) == 1:
        return torch.randn(shape)
    return torch.randn(shape) / math.sqrt(shape[-1])
