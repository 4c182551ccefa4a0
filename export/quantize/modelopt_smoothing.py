# SPDX-License-Identifier: Apache-2.0
"""Smoothing (ModelOpt's AWQ) folded into the weights of this architecture.

AWQ multiplies each channel of a projection's input by a scale and divides the weight's column by it, so that columns
with large inputs lose less to rounding. ModelOpt 0.47 fails to export such scales of this architecture, and folds them
into other weights for other architectures only. Folded they cost nothing at run time, so that is done here, before the
export, wherever it leaves the model's function as it is:

- into the weight of a norm whose output nothing but the smoothed projections reads: that of a Mamba, attention or
  MLP layer, and the gated norm in front of a Mamba layer's last projection. Query, key and value share one scale;
- into the rows of an ``up_proj``, as the root of the scale: relu² stands between it and the ``down_proj``.

Elsewhere the smoothing is undone, and the projection is stored as without it: a router and the experts read the norm
of a layer with experts too, the MTP module reads the last norm, and several heads of an ``o_proj`` read one row of the
values. ModelOpt does not smooth the experts themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_build.plugins.formats import LOW_RANK


@torch.no_grad()
def fold(model: Any, original: Callable[[str], torch.Tensor]) -> None:
    """Fold or undo the smoothing of every projection; afterwards no input has a scale for its channels.

    Args:
        model: The model, after ``mtq.quantize``. One that is not smoothed is left as it is, and so is a projection
            with a low-rank term: its smoothing is stored (:mod:`~nemo_build.export.quantize.modelopt_lowrank`).
        original: Gives a weight as it was, by its name in the model.
    """
    smoothed = {
        name: module.input_quantizer.pre_quant_scale.float().squeeze()
        for name, module in model.named_modules()
        if hasattr(getattr(module, "input_quantizer", None), "_pre_quant_scale")
        and getattr(module.weight_quantizer, LOW_RANK[0], None) is None
    }
    scales = {name: torch.ones_like(scale) for name, scale in smoothed.items()}
    for norm, readers in _norms(model):
        if all(name in smoothed for name in readers):
            scale = torch.stack([smoothed[name] for name in readers]).mean(dim=0)
            scales |= dict.fromkeys(readers, _scale_norm(model.get_submodule(norm), scale))
    rows = {}
    for up, down in _relu2_pairs(model):
        if down in smoothed:
            scales[down], rows[up] = smoothed[down], smoothed[down].sqrt()
    for name in dict.fromkeys([*scales, *rows]):
        module, weight = model.get_submodule(name), original(f"{name}.weight").float()
        if name in scales:
            weight = weight / scales[name]
            _drop_scale(module.input_quantizer, scales[name])
        if name in rows:
            weight = weight * rows[name][:, None]
            if module.bias is not None:
                module.bias.mul_(rows[name])
        module.weight.copy_(weight)
        _measure_weight(module)


def _norms(model: Any) -> Iterator[tuple[str, list[str]]]:
    """Each norm that projections alone read, and those projections."""
    readers = {
        "linear_attention": ["in_proj"],
        "full_attention": ["q_proj", "k_proj", "v_proj"],
        "mlp": ["up_proj"],
    }
    for index, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{index}"
        if layer.block_type in readers:
            yield f"{prefix}.norm", [f"{prefix}.mixer.{name}" for name in readers[layer.block_type]]
        if layer.block_type == "linear_attention":
            yield f"{prefix}.mixer.norm", [f"{prefix}.mixer.out_proj"]


def _relu2_pairs(model: Any) -> Iterator[tuple[str, str]]:
    """The two projections around each relu², but those of routed experts."""
    folders = {"mlp": "mixer", "moe": "mixer.shared_experts"}
    for index, layer in enumerate(model.model.layers):
        if layer.block_type in folders:
            prefix = f"model.layers.{index}.{folders[layer.block_type]}"
            yield f"{prefix}.up_proj", f"{prefix}.down_proj"


def _scale_norm(norm: Any, scale: torch.Tensor) -> torch.Tensor:
    """Multiply a norm's weight; returns by how much, which the weight's own type rounds."""
    before = norm.weight.to(torch.float32, copy=True)
    norm.weight.copy_(before * scale)
    return torch.where(before == 0, scale, norm.weight.float() / before)


def _drop_scale(quantizer: Any, scale: torch.Tensor) -> None:
    """Take the scale out of an input's quantizer, whose largest value follows the input as it now is."""
    del quantizer._pre_quant_scale
    quantizer._enable_pre_quant_scale = False
    if quantizer.amax is not None:
        quantizer.amax = (quantizer._amax_for_smoothing.float().squeeze() * scale).amax()


def _measure_weight(module: Any) -> None:
    """Let the quantizer see the weight as it now is."""
    from modelopt.torch.quantization.model_calib import enable_stats_collection, finish_stats_collection

    quantizer = module.weight_quantizer
    if quantizer.is_enabled:
        quantizer.reset_amax()
        enable_stats_collection(quantizer)
        quantizer(module.weight)
        finish_stats_collection(quantizer)
