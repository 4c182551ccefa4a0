# SPDX-License-Identifier: Apache-2.0
"""Reading configurations: spellings of the same, defaults, and the stored description."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.spec import GenerationDefaults, ModelSpec, load_spec, spec_from_config

from .configs import ALIASES, GENERATION, NAMES, NEW_NAMES, TINY, Config, valid_configs


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
