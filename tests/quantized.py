# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints to quantize, and what is in the result."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.quantize.quantizer import QuantizeResult, quantize_checkpoint
from nemo_build.export.quantize.recipe import Recipe, load_recipe
from nemo_build.export.quantize.streaming import DTYPES

from .tiny import reference_model

TOKENS = [np.random.default_rng(i).integers(0, 96, 40).tolist() for i in range(6)]

EVERY_KIND: dict[str, Any] = {
    "hybrid_override_pattern": "M*E-",
    "moe_latent_size": 32,
    "intermediate_size": 64,
    "use_bias": True,
    "mlp_bias": True,
    "mamba_proj_bias": True,
}
"""A configuration with every kind of layer and of projection, and with biases."""


def make_source(directory: Path) -> Path:
    """A random checkpoint whose widths divide into blocks, in two shards, in BF16."""
    import torch

    wide = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
    model = reference_model(dtype=torch.bfloat16, hybrid_override_pattern="MEM*EME", **wide)
    model.save_pretrained(directory, max_shard_size="150KB")
    (directory / "notes.txt").write_text("carried over")
    return directory


def make_mtp_source(directory: Path, dtype: Any, **config: Any) -> Path:
    """A random checkpoint with an MTP module, in one file; routers in F32, as transformers keeps them."""
    from safetensors.torch import load_file, save_file

    from .mtp_reference import save_with_mtp

    wide = {"moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}
    save_with_mtp(directory, **{"dtype": dtype, "hybrid_override_pattern": "MEM*E", **wide, **config})
    path = directory / "model.safetensors"
    stored = load_file(path)
    routers = {n: t.float() for n, t in stored.items() if ".gate." in n and not n.startswith("mtp.")}
    save_file({**stored, **routers}, path, metadata={"format": "pt"})
    return directory


def run(source: Path, out: Path, recipe: str | Recipe, **kwargs) -> QuantizeResult:
    """Quantize on :data:`TOKENS`."""
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return quantize_checkpoint(source, out, recipe, sequences=TOKENS, sequences_source="test", **kwargs)


def tensors(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint."""
    types = {**DTYPES, "F8_E4M3": ml_dtypes.float8_e4m3fn, "U8": np.uint8}
    checkpoint = Checkpoint.open(directory)
    return {
        name: np.fromfile(directory / t.file, types[t.dtype], math.prod(t.shape), offset=t.offset).reshape(
            t.shape
        )
        for name, t in checkpoint.tensors.items()
    }
