# SPDX-License-Identifier: Apache-2.0
"""Configurations that cannot be honoured: every problem is told, and nothing else is raised."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.errors import ConfigError
from nemo_build.spec import ModelSpec, load_spec, spec_from_config

from .configs import ALIASES, DENSE_8B, GENERATION, LIGHTNING, NANO, SUPER, TINY, Config, valid_configs


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
