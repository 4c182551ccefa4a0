# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint with the tensors of Nemotron 3.5 Lightning 30B-A3B.

Names, shapes and dtypes are the release's: 6,513 tensors and 65.8 GB for BF16, 18,487 tensors and 21.6 GB for NVFP4.
Weights are zeros that take no disk space (sparse files), or with --random numbers of a plausible size that do. It
shows what the tool does at full size, or at full width with few layers, where the weights themselves are not at hand.

    python scripts/synthetic_checkpoint.py [--format bf16|nvfp4|nvfp4-all] [--random] [--pattern MEM*E] OUT
    python scripts/synthetic_checkpoint.py --drafter dflash|dspark [--random] [--pattern MEM*E] OUT

nvfp4-all is NVFP4 in every projection of the trunk, where the release has FP8 and BF16 in Mamba and attention.
--drafter writes a drafter for such a checkpoint instead, with the tensors of the released ones.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np

PATTERN = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
KINDS = {"M": "mamba", "E": "moe", "*": "attention"}
SHARD_BYTES = 5_000_000_000

CONFIG = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "dtype": "bfloat16",
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "initializer_range": 0.02,
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "layers_block_type": [KINDS[c] for c in PATTERN],
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 1048576,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": 3712,
    "moe_shared_expert_overlap": True,
    "mtp_layers_block_type": ["attention", "moe"],
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, math.inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 131072,
}

DRAFTER_TAPS = [1, 5, 19, 29, 41, 51]
DRAFTER_LAYERS = 6
DRAFTER_CONFIG = {
    "attention_bias": False,
    "dtype": "bfloat16",
    "has_embed_tokens": True,
    "has_lm_head": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2688,
    "intermediate_size": 6144,
    "mask_token_id": 990,
    "max_position_embeddings": 1048576,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_aux_layers": len(DRAFTER_TAPS),
    "num_hidden_layers": DRAFTER_LAYERS,
    "num_key_value_heads": 2,
    "pard_token": 990,
    "rms_norm_eps": 1e-6,
    "sample_from_anchor": False,
    "vocab_size": 131072,
}
DRAFTERS = {
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "layer_types": ["full_attention"] * DRAFTER_LAYERS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "attention_sink_bias": True,
        "block_size": 8,
        "dflash_query_causal": True,
        "dspark_bonus_anchor": True,
        "dspark_fixup_head_type": "markov",
        "layer_types": ["sliding_attention"] * DRAFTER_LAYERS,
        "markov_head_type": "vanilla",
        "markov_rank": 512,
        "rope_theta": 10000,
        "sliding_window": 1024,
    },
}

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def mixer(kind: str, prefix: str, router_dtype: str = "F32") -> Tensors:
    """Tensors of one layer: name -> (dtype, shape)."""
    bf16: dict[str, tuple[int, ...]] = {"norm.weight": (2688,)}
    out: Tensors = {}
    if kind == "mamba":
        bf16 |= {
            "mixer.in_proj.weight": (10304, 2688),
            "mixer.conv1d.weight": (6144, 1, 4),
            "mixer.conv1d.bias": (6144,),
            "mixer.A_log": (64,),
            "mixer.D": (64,),
            "mixer.dt_bias": (64,),
            "mixer.norm.weight": (4096,),
            "mixer.out_proj.weight": (2688, 4096),
        }
    elif kind == "attention":
        bf16 |= {"mixer.q_proj.weight": (4096, 2688), "mixer.o_proj.weight": (2688, 4096)}
        bf16 |= {f"mixer.{n}_proj.weight": (256, 2688) for n in "kv"}
    else:
        out[f"{prefix}.mixer.gate.weight"] = (router_dtype, (128, 2688))
        out[f"{prefix}.mixer.gate.e_score_correction_bias"] = ("F32", (128,))
        for e in range(128):
            bf16[f"mixer.experts.{e}.up_proj.weight"] = (1856, 2688)
            bf16[f"mixer.experts.{e}.down_proj.weight"] = (2688, 1856)
        bf16["mixer.shared_experts.up_proj.weight"] = (3712, 2688)
        bf16["mixer.shared_experts.down_proj.weight"] = (2688, 3712)
    return out | {f"{prefix}.{name}": ("BF16", shape) for name, shape in bf16.items()}


def release_tensors(pattern: str = PATTERN, mtp: bool = True) -> Tensors:
    """All tensors of the BF16 release, or of one with other layers."""
    tensors: Tensors = {"backbone.embeddings.weight": ("BF16", (131072, 2688))}
    for i, c in enumerate(pattern):
        tensors |= mixer(KINDS[c], f"backbone.layers.{i}")
    tensors |= {"backbone.norm_f.weight": ("BF16", (2688,)), "lm_head.weight": ("BF16", (131072, 2688))}
    if not mtp:
        return tensors
    tensors |= {f"mtp.layers.0.{n}.weight": ("BF16", (2688,)) for n in ("enorm", "hnorm")}
    tensors["mtp.layers.0.eh_proj.weight"] = ("BF16", (2688, 5376))
    tensors |= mixer("attention", "mtp.layers.0")
    tensors |= mixer("moe", "mtp.layers.1", router_dtype="BF16")
    tensors["mtp.layers.1.final_layernorm.weight"] = ("BF16", (2688,))
    return tensors


def nvfp4_tensors(release: Tensors, everything: bool = False) -> Tensors:
    """The NVFP4 release: NVFP4 experts and head, FP8 Mamba projections and caches; or NVFP4 in all projections."""
    out: Tensors = {}
    for name, (dtype, shape) in release.items():
        module = name.removesuffix(".weight")
        trunk = not name.startswith("mtp.")
        experts = ".experts." in name or ".shared_experts." in name or module == "lm_head"
        if trunk and (experts or (everything and module.endswith("_proj"))):
            out |= _packed(module, *shape)
        elif trunk and module.endswith((".in_proj", ".out_proj")):
            out[name] = ("F8_E4M3", shape)
            out[f"{module}.weight_scale"] = out[f"{module}.input_scale"] = ("F32", ())
        else:
            out[name] = (dtype, shape)
            if trunk and module.endswith(("k_proj", "v_proj")):
                out[f"{module}.{module[-6]}_scale"] = ("F32", (1,))
    return out


def drafter_config(kind: str, pattern: str = PATTERN) -> dict[str, object]:
    """A released drafter's ``config.json``, or the same for a model with other layers, which are tapped evenly.

    There are as many taps then as well: of a model with fewer layers some come twice.
    """
    last = len(pattern) - 1
    even = [round(i * last / (len(DRAFTER_TAPS) - 1)) for i in range(len(DRAFTER_TAPS))]
    taps = DRAFTER_TAPS if pattern == PATTERN else even
    readers = [t + 1 for t in taps]
    return {
        **DRAFTER_CONFIG,
        **DRAFTERS[kind],
        "eagle_aux_hidden_state_layer_ids": readers,
        "num_target_layers": len(pattern),
        "target_layer_ids": taps,
    }


def drafter_tensors(kind: str) -> Tensors:
    """All tensors of a released drafter: NVFP4 without activation scales, but for attention and embeddings."""
    out: Tensors = {"embed_tokens.weight": ("BF16", (131072, 2688))}
    out |= _packed("fc", 2688, len(DRAFTER_TAPS) * 2688)
    for i in range(DRAFTER_LAYERS):
        layer = f"layers.{i}"
        norms = {"input_layernorm": 2688, "post_attention_layernorm": 2688}
        norms |= {"self_attn.q_norm": 128, "self_attn.k_norm": 128}
        attention = {"q": (4096, 2688), "k": (256, 2688), "v": (256, 2688), "o": (2688, 4096)}
        out |= {f"{layer}.{name}.weight": ("BF16", (width,)) for name, width in norms.items()}
        out |= {f"{layer}.self_attn.{n}_proj.weight": ("BF16", shape) for n, shape in attention.items()}
        if kind == "dspark":
            out[f"{layer}.self_attn.attention_sink_bias"] = ("BF16", (32,))
        out |= _packed(f"{layer}.mlp.gate_proj", 6144, 2688) | _packed(f"{layer}.mlp.up_proj", 6144, 2688)
        out |= _packed(f"{layer}.mlp.down_proj", 2688, 6144)
    out |= {f"{name}.weight": ("BF16", (2688,)) for name in ("hidden_norm", "norm")}
    if kind == "dspark":
        out["markov_head.markov_w1.weight"] = ("BF16", (131072, 512))
        out |= _packed("markov_head.markov_w2", 131072, 512)
    return out


def _packed(module: str, rows: int, columns: int) -> Tensors:
    """The tensors of a projection in NVFP4."""
    return {
        f"{module}.weight": ("U8", (rows, columns // 2)),
        f"{module}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{module}.weight_scale_2": ("F32", ()),
    }


def write_tokenizer(out: Path, size: int) -> None:
    """Write a tokenizer that has a text for every id, for engines that are to be loaded."""
    model = {"type": "BPE", "vocab": {f"{i:x}": i for i in range(size)}, "merges": []}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {"version": "1.0", "added_tokens": [], "decoder": decoder, "model": model}
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_checkpoint(out: Path, tensors: Tensors, config: dict[str, object], *, random: bool = False) -> None:
    """Write configuration, index and shards of at most :data:`SHARD_BYTES`: sparse ones, or random numbers."""
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    generation = {
        "bos_token_id": 1,
        "eos_token_id": [2, 11],
        "pad_token_id": 0,
        "temperature": 1.0,
        "top_p": 0.95,
    }
    (out / "generation_config.json").write_text(json.dumps({**generation, "do_sample": True}))
    shards: list[Tensors] = [{}]
    size = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = _nbytes(dtype, shape)
        if size + nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = (dtype, shape)
        size += nbytes
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(out / file, shard, random)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(_nbytes(*t) for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_shard(path: Path, tensors: Tensors, random: bool) -> None:
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % 8)
    with open(path, "wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        if random:
            for name, (dtype, shape) in tensors.items():
                _write_random(file, name, dtype, math.prod(shape))
        else:
            file.truncate(8 + len(data) + at)


def _write_random(file: BinaryIO, name: str, dtype: str, count: int) -> None:
    """Values of a plausible size; large tensors repeat a block of random numbers, each from a place of its own."""
    rng = np.random.default_rng(list(name.encode()))
    if dtype == "F32" and count == 1:
        file.write(np.float32(0.004 if name.endswith(("scale", "scale_2")) else 0).tobytes())
        return
    block = min(count, 1 << 22)
    if dtype == "U8":
        codes = rng.integers(0, 256, block, np.uint8)
    elif dtype == "F8_E4M3" and name.endswith("weight_scale"):
        codes = rng.integers(0x30, 0x40, block, np.uint8)  # 0.5 to 1.9
    elif dtype == "F8_E4M3":
        codes = rng.integers(0, 256, block, np.uint8) & 0xBF  # below 2
    else:
        values = rng.standard_normal(block).astype(np.float32) * np.float32(0.02)
        if "norm" in name or name.endswith((".A_log", ".D")):
            values += 1
        words = values.view(np.uint32)
        codes = values.view(np.uint8) if dtype == "F32" else (words >> 16).astype(np.uint16).view(np.uint8)
    left = _nbytes(dtype, (count,))
    while left:
        piece = codes[:left]
        file.write(piece.tobytes())
        left -= len(piece)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}[dtype] * math.prod(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=["bf16", "nvfp4", "nvfp4-all"], default="bf16")
    parser.add_argument("--random", action="store_true", help="numbers instead of zeros")
    parser.add_argument("--pattern", default=PATTERN, help="layers: M Mamba, E experts, * attention")
    parser.add_argument("--no-mtp", action="store_true", help="without the MTP module")
    parser.add_argument(
        "--drafter", choices=sorted(DRAFTERS), help="a drafter instead; --format has no effect"
    )
    parser.add_argument("--tokenizer", action="store_true", help="with a made-up tokenizer")
    options = parser.parse_args()
    if options.drafter:
        tensors = drafter_tensors(options.drafter)
        config = drafter_config(options.drafter, options.pattern)
    else:
        tensors, config = _model(options)
    write_checkpoint(options.out, tensors, config, random=options.random)
    if options.tokenizer:
        write_tokenizer(options.out, CONFIG["vocab_size"])
    print(f"{options.out}: {len(tensors)} tensors, {sum(_nbytes(*t) for t in tensors.values()):,} bytes")


def _model(options: argparse.Namespace) -> tuple[Tensors, dict[str, object]]:
    """Tensors and configuration of a model."""
    tensors = release_tensors(options.pattern, not options.no_mtp)
    if options.format != "bf16":
        tensors = nvfp4_tensors(tensors, everything=options.format == "nvfp4-all")
    config: dict[str, object] = {**CONFIG, "layers_block_type": [KINDS[c] for c in options.pattern]}
    config["num_hidden_layers"] = len(options.pattern)
    if options.no_mtp:
        config["num_nextn_predict_layers"] = 0
    return tensors, config


if __name__ == "__main__":
    main()
