# SPDX-License-Identifier: Apache-2.0
"""Reading the configurations of published models."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_build.spec import BlockKind, GenerationDefaults, load_spec, spec_from_config

from .configs import DENSE_8B, GENERATION, LIGHTNING, NANO, SUPER, without


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
