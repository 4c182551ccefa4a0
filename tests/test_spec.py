# SPDX-License-Identifier: Apache-2.0
"""Reading configurations: published models, spellings, errors."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.errors import ConfigError
from nemo_build.spec import BlockKind, GenerationDefaults, ModelSpec, load_spec, spec_from_config

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


# --- published models -------------------------------------------------------------------------------------


def test_nano() -> None:
    spec = spec_from_config(NANO)
    assert spec.indices(BlockKind.ATTENTION) == (5, 12, 19, 26, 33, 42)
    assert [len(spec.indices(kind)) for kind in BlockKind] == [23, 6, 23, 0]
    assert spec.mamba is not None
    assert (spec.mamba.inner_size, spec.mamba.conv_dim, spec.mamba.in_proj_size) == (4096, 6144, 10304)
    assert spec.mamba.dt_limit == (0.0, math.inf)
    assert spec.attention is not None
    assert spec.attention.scale == 128**-0.5
    assert spec.moe is not None
    assert (spec.moe.latent_size, spec.moe.scaling_factor, spec.moe.num_expert_groups) == (None, 2.5, 1)
    assert (spec.mlp, spec.mtp) == (None, None)
    assert spec.generation == GenerationDefaults(eos_token_ids=(2,), bos_token_id=1, pad_token_id=0)


def test_lightning_is_nano_with_mtp_and_a_longer_context() -> None:
    nano, lightning = spec_from_config(NANO), spec_from_config(LIGHTNING, GENERATION)
    assert lightning.layers == nano.layers
    assert (lightning.mamba, lightning.attention, lightning.moe) == (nano.mamba, nano.attention, nano.moe)
    assert lightning.mtp is not None
    assert lightning.mtp.layers == (BlockKind.ATTENTION, BlockKind.MOE)
    assert lightning.mtp.num_modules == 1
    assert lightning.max_positions == 1048576
    assert lightning.generation == GenerationDefaults((2, 11), 1, 0, temperature=1.0, top_p=0.95)


def test_dense_model_has_no_experts() -> None:
    spec = spec_from_config(DENSE_8B)
    assert spec.moe is None
    assert spec.mlp is not None
    assert spec.mlp.intermediate_size == 21504
    assert spec.attention is not None
    assert (spec.attention.num_kv_heads, spec.attention.head_dim) == (8, 128)
    # Fields of blocks that the model does not have are not looked at.
    assert spec_from_config(DENSE_8B | {"n_routed_experts": 0, "n_shared_experts": 0, "n_group": 3}) == spec


def test_super_has_latent_experts() -> None:
    spec = spec_from_config(SUPER)
    assert len(spec.layers) == 88
    assert spec.moe is not None
    assert (spec.moe.latent_size, spec.moe.num_experts, spec.moe.top_k) == (1024, 512, 22)
    assert spec.generation.eos_token_ids == (2, 11)


def test_sections_of_blocks_that_only_mtp_has() -> None:
    config = DENSE_8B | {
        k: NANO[k] for k in ("n_routed_experts", "num_experts_per_tok", "routed_scaling_factor")
    }
    config |= {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}
    assert spec_from_config(config).moe is None
    config |= {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*E"}
    spec = spec_from_config(config)
    assert spec.moe is not None
    assert spec.mtp is not None
    assert spec.mtp.num_modules == 2


@pytest.mark.slow
def test_agrees_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.NemotronHConfig(
        **without(LIGHTNING, "quantization_config", "auto_map", "transformers_version")
    )
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["layers_block_type"][0] == "linear_attention"
    assert saved["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    assert load_spec(tmp_path) == spec_from_config(LIGHTNING, GENERATION)
    full = json.loads(config.to_json_string(use_diff=False))
    assert spec_from_config(full, GENERATION) == load_spec(tmp_path)


def test_import_is_light() -> None:
    code = "import sys, nemo_build.spec_config; print({'numpy', 'torch', 'onnx'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# --- spellings --------------------------------------------------------------------------------------------

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


def spell_float(draw: st.DrawFn, value: Any) -> Any:
    """One of the ways in which a config may write this float."""
    if isinstance(value, list):
        return [spell_float(draw, v) for v in value]
    if value == math.inf:
        return draw(st.sampled_from([value, "Infinity", "inf", {"__float__": "Infinity"}]))
    return draw(st.sampled_from([value, repr(value)]))


@st.composite
def respelled(draw: st.DrawFn) -> tuple[Config, Config]:
    """A configuration, and the same one with other spellings."""
    config = draw(valid_configs())
    other = dict(config)
    for name, aliases in ALIASES.items():
        if name in other and draw(st.booleans()):
            other[draw(st.sampled_from(aliases))] = other[name]
            if draw(st.booleans()):
                del other[name]
    for name in ("layer_norm_epsilon", "norm_eps", "time_step_limit", "mamba_dt_limit"):
        if name in other:
            other[name] = spell_float(draw, other[name])
    for pattern, lists in (
        ("hybrid_override_pattern", ("layers_block_type", "layer_types")),
        ("mtp_hybrid_override_pattern", ("mtp_layers_block_type",)),
    ):
        if pattern in other and draw(st.booleans()):
            names = draw(st.sampled_from([NAMES, NEW_NAMES]))
            other[draw(st.sampled_from(lists))] = [names[c] for c in other[pattern]]
            if draw(st.booleans()):
                del other[pattern]
    if draw(st.booleans()):
        other["num_hidden_layers"] = len(config["hybrid_override_pattern"])
    if other["torch_dtype" if "torch_dtype" in other else "dtype"] and draw(st.booleans()):
        other = {k: f"torch.{v}" if k in ("torch_dtype", "dtype") else v for k, v in other.items()}
    order = draw(st.permutations(sorted(other)))
    return config, {name: other[name] for name in order}


@given(respelled())
def test_spellings_are_equivalent(pair: tuple[Config, Config]) -> None:
    config, other = pair
    assert spec_from_config(other) == spec_from_config(config)


@given(valid_configs(), st.none() | st.just(GENERATION | {"eos_token_id": [2, 11]}))
def test_json_round_trip(config: Config, generation: Config | None) -> None:
    spec = spec_from_config(config, generation)
    text = json.dumps(spec.to_json(), allow_nan=False)
    assert ModelSpec.from_json(json.loads(text)) == spec
    assert json.dumps(ModelSpec.from_json(json.loads(text)).to_json(), allow_nan=False) == text


def test_float_literals(tmp_path: Path) -> None:
    text = json.dumps(TINY | {"time_step_limit": [0.0, math.inf]})
    assert "Infinity" in text
    (tmp_path / "config.json").write_text(text)
    assert load_spec(tmp_path) == spec_from_config(TINY)


def test_null_key_value_heads_means_one_a_head() -> None:
    spec = spec_from_config(TINY | {"num_key_value_heads": None})
    assert spec.attention is not None
    assert spec.attention.num_kv_heads == 4


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, GenerationDefaults((7, 2))),
        ({"eos_token_id": 11}, GenerationDefaults((11, 7, 2))),
        ({"eos_token_id": [2, 11], "bos_token_id": 3}, GenerationDefaults((2, 11, 7), bos_token_id=3)),
        ({"temperature": 0.6, "top_k": 20}, GenerationDefaults((7, 2), temperature=0.6, top_k=20)),
        ({"temperature": 0.6, "do_sample": False}, GenerationDefaults((7, 2), temperature=0.0)),
        ({"top_k": -1, "top_p": 1}, GenerationDefaults((7, 2), top_p=1.0)),
        ({"repetition_penalty": 1.0, "min_p": None, "max_new_tokens": 5}, GenerationDefaults((7, 2))),
    ],
)
def test_generation_defaults(generation: Config, expected: GenerationDefaults) -> None:
    assert spec_from_config(TINY | {"eos_token_id": [7, 2]}, generation).generation == expected


# --- errors -----------------------------------------------------------------------------------------------


def golden(file: str) -> dict[str, str]:
    """The messages of a golden file: ``## name`` on a line, then the text."""
    text = (Path(__file__).parent / "golden" / file).read_text(encoding="utf-8")
    return {name: body.strip() for name, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.M)}


# By name of the golden message: changes to TINY (... removes a field), and generation_config.json if any.
BAD: dict[str, Config | tuple[Config, Config]] = {
    "missing fields": {
        "vocab_size": ...,
        "head_dim": ...,
        "n_routed_experts": None,
        "layer_norm_epsilon": ...,
        "model_type": ...,
    },
    "no layers": {"hybrid_override_pattern": ...},
    "pattern character": {"hybrid_override_pattern": "MxE|"},
    "pattern not a string": {"hybrid_override_pattern": ["M", "E"]},
    "layer list": {"layers_block_type": ["mamba", "sliding_attention", 3], "hybrid_override_pattern": ...},
    "layer list empty": {"layer_types": [], "hybrid_override_pattern": ...},
    "list and pattern differ": {"layers_block_type": ["mamba", "moe", "moe", "mlp"]},
    "list and pattern lengths": {"layers_block_type": ["mamba", "moe"]},
    "two lists differ": {
        "layers_block_type": ["mamba"],
        "layer_types": ["moe"],
        "hybrid_override_pattern": ...,
    },
    "number of layers": {"num_hidden_layers": 52},
    "mtp without layers": {"num_nextn_predict_layers": 1},
    "mtp pattern": {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*e"},
    "unknown fields": {"rope_interleaved": True, "block_configs": [{"block_type": "mamba"}] * 9},
    "spellings disagree": {"n_groups": 2, "mamba_n_groups": 4, "norm_eps": 1e-06},
    "wrong types": {
        "hidden_size": True,
        "vocab_size": 96.0,
        "conv_kernel": "4",
        "tie_word_embeddings": 0,
        "dtype": 16,
    },
    "not positive": {
        "hidden_size": 0,
        "head_dim": -8,
        "layer_norm_epsilon": 0.0,
        "routed_scaling_factor": {"__float__": "Infinity"},
    },
    "not a number": {"layer_norm_epsilon": math.nan, "routed_scaling_factor": "two"},
    "dtypes": {"torch_dtype": "float64", "mamba_ssm_cache_dtype": "auto"},
    "dt limit": {"time_step_limit": [0.1, 0.001]},
    "dt limit length": {"mamba_dt_limit": [0.0]},
    "mamba groups": {"n_groups": 3},
    "mamba biases": {"use_bias": False, "mamba_proj_bias": True},
    "kv heads": {"num_key_value_heads": 3},
    "expert groups": {"n_group": 3},
    "small expert groups": {"n_group": 8, "topk_group": 4},
    "top groups": {"n_group": 2, "topk_group": 3},
    "top k": {"n_group": 4, "topk_group": 1},
    "another architecture": {
        "architectures": ["NemotronHPuzzleForCausalLM"],
        "model_type": "nemotron_h_puzzle",
    },
    "one value only": {
        "attention_bias": True,
        "sliding_window": 4096,
        "n_shared_experts": 2,
        "mamba_hidden_act": "gelu",
        "mlp_hidden_act": "silu",
        "rope_scaling": {"type": "yarn"},
    },
    "token ids": {"eos_token_id": [2, 96], "bos_token_id": -1, "pad_token_id": [0]},
    "generation": (
        {},
        {
            "temperature": -1,
            "top_p": 1.5,
            "top_k": 0.5,
            "eos_token_id": "</s>",
            "repetition_penalty": 1.1,
            "do_sample": 1,
        },
    ),
    "generation unknown": ({}, {"mirostat": 2}),
    "top k of all experts": {"num_experts_per_tok": 9},
}


@pytest.mark.parametrize("name", BAD)
def test_golden_errors(name: str) -> None:
    bad = BAD[name]
    changes, generation = bad if isinstance(bad, tuple) else (bad, None)
    config = {k: v for k, v in (TINY | changes).items() if v is not ...}
    with pytest.raises(ConfigError) as caught:
        spec_from_config(config, generation)
    assert str(caught.value) == golden("config_errors.txt")[name]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "DIR: no config.json"),
        (
            {"config.json": b"{"},
            "not JSON: Expecting property name enclosed in double quotes: line 1 column 2",
        ),
        ({"config.json": b"[1, 2]"}, "config.json: expected a JSON object, found [1, 2]"),
        ({"config.json": b'{"a": "\xff"}'}, "config.json: not JSON: 'utf-8' codec can't decode byte 0xff"),
        (
            {"config.json": b'{"a": 1, "b": 2, "a": 1}'},
            'config.json: not JSON: field given more than once: "a"',
        ),
        ({"config.json": b"[" * 100_000}, "config.json: not JSON: nested too deeply"),
        ({"config.json": b"9" * 5000}, "config.json: not JSON: Exceeds the limit"),
        (
            {"config.json": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"},
            "config.json: a git-lfs pointer, not the file itself (run `git lfs pull`)",
        ),
        (
            {"config.json": json.dumps(TINY).encode(), "generation_config.json": b"null"},
            "generation_config.json: expected a JSON object, found null",
        ),
    ],
)
def test_unreadable_files(tmp_path: Path, files: dict[str, bytes], expected: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_spec(tmp_path)
    assert expected in str(caught.value).replace(str(tmp_path), "DIR")


def test_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("")
    with pytest.raises(
        ConfigError, match=r"model: no config\.json\nGive the directory of a Hugging Face checkpoint"
    ):
        load_spec(tmp_path / "model")


# --- anything else is a ConfigError -----------------------------------------------------------------------


def attempt(build: Callable[[], ModelSpec]) -> ModelSpec | ConfigError:
    try:
        return build()
    except ConfigError as error:
        return error


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["M", "moe", "float32", "inf", "nan", "\ud800", 10**400]),
    lambda v: (
        st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3) | st.just("__float__"), v, max_size=2)
    ),
    max_leaves=6,
)
field_names = st.sampled_from(
    sorted(LIGHTNING | SUPER | TINY | GENERATION | dict.fromkeys(sum(ALIASES.values(), ())))
)


@given(
    st.sampled_from([NANO, LIGHTNING, DENSE_8B, SUPER, TINY]),
    st.dictionaries(field_names | st.text(max_size=5), json_values | st.just(...), max_size=4),
    st.none() | st.dictionaries(field_names | st.text(max_size=5), json_values, max_size=4),
)
def test_only_config_errors(config: Config, changes: Config, generation: Config | None) -> None:
    changed = {k: v for k, v in (copy.deepcopy(config) | changes).items() if v is not ...}
    result = attempt(lambda: spec_from_config(changed, generation))
    if isinstance(result, ConfigError):
        assert result.problems
        str(result).encode("utf-8")
    else:
        assert ModelSpec.from_json(json.loads(json.dumps(result.to_json(), allow_nan=False))) == result


@given(
    st.binary(max_size=40) | st.text(max_size=40).map(str.encode), st.integers(0, 10**9), st.integers(0, 30)
)
def test_damaged_files_raise_config_errors_only(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, position: int, cut: int
) -> None:
    text = json.dumps(TINY).encode()
    position %= len(text)
    directory = tmp_path_factory.getbasetemp()
    (directory / "config.json").write_bytes(text[:position] + junk + text[position + cut :])
    result = attempt(lambda: load_spec(directory))
    assert isinstance(result, ModelSpec) or str(result).startswith(str(directory))


@given(valid_configs(), st.lists(st.text(max_size=3), min_size=1, max_size=3), json_values)
def test_damaged_descriptions_raise_config_errors_only(config: Config, path: list[str], value: Any) -> None:
    data = spec_from_config(config).to_json()
    node: Any = data
    for step in path:
        if not isinstance(node, dict) or not node:
            break
        name = sorted(node)[hash(step) % len(node)]
        if not isinstance(node[name], dict):
            node[name] = value
        node = node[name]
    result = attempt(lambda: ModelSpec.from_json(data))
    if isinstance(result, ConfigError):
        assert "a stored model description is damaged" in str(result)
    else:
        assert result.to_json() == data
