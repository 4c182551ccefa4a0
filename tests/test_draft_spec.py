# SPDX-License-Identifier: Apache-2.0
"""Reading drafters' configurations: what is honoured, and every problem in one message."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from nemo_build.errors import ConfigError
from nemo_build.export.drafters import drafter_tensors
from nemo_build.spec import spec_from_config
from nemo_build.spec_draft import DraftKind, DraftSpec, RotarySpec, YarnSpec, load_draft
from nemo_build.spec_draft_config import build_draft

from .configs import LIGHTNING
from .draft_reference import CONFIGS

TARGET = spec_from_config(LIGHTNING)
TAPS = [1, 5, 19, 29, 41, 51]
RELEASED: dict[str, Any] = {
    "attention_bias": False,
    "draft_vocab_size": None,
    "dtype": "bfloat16",
    "eagle_aux_hidden_state_layer_ids": [t + 1 for t in TAPS],
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
    "num_aux_layers": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "pard_token": 990,
    "quantization_config": {"quant_algo": "W4A16_NVFP4", "ignore": ["*self_attn*"]},
    "rms_norm_eps": 1e-06,
    "sample_from_anchor": False,
    "target_layer_ids": TAPS,
    "train_embed_tokens": False,
    "transformers_version": "5.5.3",
    "use_cache": False,
    "vocab_size": 131072,
}
"""What both released drafters say."""

DFLASH = RELEASED | {
    "architectures": ["DFlashDraftModel"],
    "dflash_config": {"causal": False, "mask_token_id": 990, "target_layer_ids": TAPS},
    "layer_types": ["full_attention"] * 6,
    "rope_parameters": {
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 10000,
        "rope_type": "yarn",
    },
}
DSPARK = RELEASED | {
    "architectures": ["Qwen3DSparkModel"],
    "attention_sink_bias": True,
    "block_size": 8,
    "dflash_config": {
        "attention_sink_bias": True,
        "causal": True,
        "mask_token_id": 990,
        "sample_from_anchor": False,
        "swa_window_size": 1024,
        "target_layer_ids": TAPS,
        "use_swa": True,
    },
    "dflash_query_causal": True,
    "dspark_bonus_anchor": True,
    "dspark_fixup_head_type": "markov",
    "dspark_markov_rank": 512,
    "layer_types": ["sliding_attention"] * 6,
    "markov_head_type": "vanilla",
    "markov_rank": 512,
    "rope_parameters": None,
    "rope_theta": 10000,
    "sliding_window": 1024,
}


def test_the_released_drafters():
    flash, spark = (build_draft(c, TARGET, "config.json") for c in (DFLASH, DSPARK))
    assert (flash.kind, spark.kind) == (DraftKind.DFLASH, DraftKind.DSPARK)
    for spec in (flash, spark):
        assert spec.taps == tuple(TAPS)
        assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.mask_token_id) == (32, 2, 128, 990)
        assert (spec.own_embeddings, spec.own_head, spec.confidence) == (True, False, False)
        assert not spec.sample_from_anchor
    assert flash.windows == (0,) * 6
    assert (flash.causal, flash.sinks, flash.markov_rank, flash.block_size, flash.max_drafted) == (
        *(False, False, 0),
        *(None, None),
    )
    assert flash.rotary.yarn is not None
    assert math.isclose(flash.rotary.attention_factor, 0.1 * math.log(128) + 1)
    assert spark.windows == (1024,) * 6
    assert (spark.causal, spark.sinks, spark.markov_rank, spark.block_size, spark.max_drafted) == (
        *(True, True, 512),
        *(8, 7),
    )
    assert spark.rotary == RotarySpec(10000.0, 128, None)


def test_the_released_tensors():
    """What the ledger expects of the DSpark release is its 118 tensors to the byte; DFlash has ten less."""
    counted = {}
    for name, config in (("dspark", DSPARK), ("dflash", DFLASH)):
        tensors, nbytes = 0, 0
        for tensor, rule in drafter_tensors(build_draft(config, TARGET, "config.json")).items():
            elements = math.prod(rule.shape)
            packed = rule.projection and "self_attn" not in tensor
            tensors += 3 if packed else 1
            nbytes += elements // 2 + elements // 16 + 4 if packed else 2 * elements
        counted[name] = tensors, nbytes
    assert counted["dspark"] == (118, 1_349_045_200)
    assert counted["dflash"][0] == 108


@pytest.mark.parametrize("config", [DFLASH, DSPARK])
def test_json_round_trip(config):
    spec = build_draft(config, TARGET, "config.json")
    assert DraftSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(ConfigError, match=r"draft\.kind: expected a DraftKind"):
        DraftSpec.from_json(spec.to_json() | {"kind": "eagle"})


def test_defaults_are_those_of_the_trainers():
    """A DSpark drafter without a word on anchors samples from them; DFlash never does."""
    bare = {
        k: v
        for k, v in DSPARK.items()
        if k not in ("sample_from_anchor", "dspark_bonus_anchor", "dflash_config")
    }
    spec = build_draft(bare | {"dflash_query_causal": None, "block_size": 7}, TARGET, "config.json")
    assert (spec.sample_from_anchor, spec.causal, spec.max_drafted) == (True, False, 7)
    bare = {k: v for k, v in DFLASH.items() if k not in ("sample_from_anchor", "layer_types", "has_lm_head")}
    spec = build_draft(bare, TARGET, "config.json")
    assert (spec.sample_from_anchor, spec.windows, spec.own_head) == (False, (0,) * 6, None)
    spec = build_draft(
        bare | {"sliding_window": 5, "dflash_config": {"use_swa": True}}, TARGET, "config.json"
    )
    assert spec.windows == (5,) * 6


@pytest.mark.parametrize(
    "rope", [{"beta_fast": 8.0}, {"mscale": 0.7, "mscale_all_dim": 0.3}, {"truncate": False}]
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_yarn_is_that_of_transformers(rope, head_dim):
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    yarn = {**DFLASH["rope_parameters"], **rope}
    spec = build_draft(DFLASH | {"rope_parameters": yarn, "head_dim": head_dim}, TARGET, "config.json").rotary
    assert isinstance(spec.yarn, YarnSpec)
    theirs = Qwen3RotaryEmbedding(
        Qwen3Config(head_dim=head_dim, rope_parameters=yarn, max_position_embeddings=1 << 20)
    )
    assert math.isclose(spec.attention_factor, theirs.attention_scaling)
    torch.testing.assert_close(torch.tensor(spec.frequencies()), theirs.inv_freq, rtol=1e-6, atol=0)


BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "contradictions": (
        {
            "mask_token_id": 991,
            "dspark_markov_rank": 256,
            "dspark_bonus_anchor": False,
            "eagle_aux_hidden_state_layer_ids": TAPS,
            "num_aux_layers": 5,
            "num_hidden_layers": 5,
            "attention_sink_bias": False,
            "dflash_query_causal": False,
            "sliding_window": 512,
        },
        [
            "num_hidden_layers: 5, but layer_types has 6 layers",
            "markov_rank: 512, but dspark_markov_rank is 256",
            "eagle_aux_hidden_state_layer_ids: [1, 5, 19, 29, 41, 51] is not target_layer_ids plus one",
            "num_aux_layers: 5, but 6 layers are listed",
            "sliding_window: 512, but dflash_config.swa_window_size is 1024",
            "dflash_config.causal: true, but dflash_query_causal is false",
            "attention_sink_bias: false, but dflash_config.attention_sink_bias is true",
            "mask_token_id: 991, but dflash_config.mask_token_id is 990",
            "mask_token_id: 991, but pard_token is 990",
            "sample_from_anchor: false, but dspark_bonus_anchor, its opposite, is too",
        ],
    ),
    "for another target": (
        {
            "hidden_size": 2048,
            "vocab_size": 1000,
            "draft_vocab_size": 500,
            "num_target_layers": 36,
            "target_layer_ids": [1, 52],
            "dflash_config": {"use_swa": True},
            "mask_token_id": 131072,
            "pard_token": None,
            "eagle_aux_hidden_state_layer_ids": None,
            "num_aux_layers": None,
        },
        [
            "vocab_size: 1000, but the target's is 131072",
            "hidden_size: 2048, but the target's is 2688",
            "target_layer_ids: [52]: the target has layers 0 to 51",
            "mask_token_id: 131072 is not below the vocabulary's size 131072",
            "draft_vocab_size: 500, but only 131072 will do: a drafter with a vocabulary of its own is not supported",
            "num_target_layers: 36, but only 52 will do: the target's number of layers",
        ],
    ),
    "not supported": (
        {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "llama",
            "attention_bias": True,
            "markov_head_type": "gated",
            "rope_scaling": {"type": "longrope", "factor": 4},
            "layer_types": ["chunked_attention"],
            "enable_confidence_head": True,
            "confidence_head_with_markov": False,
            "num_key_value_heads": 5,
            "head_dim": 127,
            "block_size": 1,
        },
        [
            'architectures: ["DFlash2DraftModel"], but a drafter is ["DFlashDraftModel"] or ["Qwen3DSparkModel"]',
            'model_type: "llama", but only "qwen3" is supported',
            "attention_bias: true, but only false is supported",
            'markov_head_type: "gated", but only "vanilla" is supported '
            "(it scales the previous token's embedding by a gate over the hidden state)",
            "num_key_value_heads: 5 does not divide num_attention_heads = 32",
            "head_dim: 127 is odd: rotary positions turn pairs",
            'layer_types: expected a list of full_attention and sliding_attention, found ["chunked_attention"]',
            'rope_scaling.type: "longrope", but only "default" and "yarn" are supported',
            "block_size: expected a whole number of at least 2, found 1",
            "confidence_head_with_markov: false, but only true is supported",
        ],
    ),
    "missing and unknown": (
        {
            "architectures": None,
            "intermediate_size": None,
            "rms_norm_eps": None,
            "rope_theta": None,
            "target_layer_ids": None,
            "eagle_aux_hidden_state_layer_ids": None,
            "dflash_config": {"projector_type": "dspark"},
            "rope_scaling": 4,
            "domino": [1],
            "layer_types": None,
            "use_sliding_window": True,
        },
        [
            "architectures: missing",
            "rope_scaling: expected an object, found 4",
            "target_layer_ids: missing (also accepted in dflash_config)",
            "layer_types: missing, but use_sliding_window is true: which layers slide?",
            "intermediate_size: missing",
            "rms_norm_eps: missing",
            "rope_theta: missing (also accepted as rope_parameters.rope_theta, rope_scaling.rope_theta)",
            'dflash_config.projector_type: unknown field, here "dspark"',
            "domino: unknown field, here [1]",
        ],
    ),
    "rnn head": (
        {"markov_head_type": "rnn"},
        [
            'markov_head_type: "rnn", but only "vanilla" is supported (it carries a state from token to token)',
        ],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_every_problem_is_told(name):
    changes, problems = BAD[name]
    with pytest.raises(ConfigError) as caught:
        build_draft(DSPARK | changes, TARGET, "config.json")
    assert caught.value.headline == "config.json: this drafter cannot be honoured"
    assert sorted(caught.value.problems) == sorted(problems)


def test_a_directory_without_a_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_draft(tmp_path, TARGET)


def test_a_target_is_no_drafter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in LIGHTNING.items() if v != math.inf}))
    with pytest.raises(ConfigError, match=r'\["NemotronHForCausalLM"\], but a drafter is'):
        load_draft(tmp_path, TARGET)
    assert CONFIGS["dflash"]["architectures"] == DFLASH["architectures"]
