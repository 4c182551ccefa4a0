# SPDX-License-Identifier: Apache-2.0
"""The metadata of a quantized checkpoint, as ModelOpt's unified Hugging Face export writes it.

``hf_quant_config.json`` holds ModelOpt's own form; ``quantization_config`` in ``config.json`` holds the same in the
compressed-tensors form. Loaders (vLLM, SGLang, TensorRT-LLM) read one or the other.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import nemo_build
from nemo_build.export.quantize.recipe import Assignment

_GROUP_SIZE = 16
_LOW_RANK_FLAGS = ("has_zero_point", "pre_quant_scale", "lora_rank")


def algorithm(assignment: Assignment) -> dict[str, Any]:
    """ModelOpt's name for how a module is stored. It has one for low-rank terms, whether inputs are rounded or not."""
    if assignment.format == "fp8":
        return {"quant_algo": "FP8"}
    if assignment.rank:
        flags = {"has_zero_point": False, "pre_quant_scale": True, "lora_rank": assignment.rank}
        return {"quant_algo": "NVFP4_SVD", "group_size": _GROUP_SIZE, **flags}
    name = "NVFP4" if assignment.activations else "W4A16_NVFP4"
    return {"quant_algo": name, "group_size": _GROUP_SIZE}


def hf_quant_config(
    assignments: Mapping[str, Assignment], kept: Iterable[str], kv_cache: str
) -> dict[str, Any]:
    """The contents of ``hf_quant_config.json``.

    Args:
        assignments: How each quantized module is stored.
        kept: Modules with a weight that are not quantized.
        kv_cache: ``none`` or ``fp8``.
    """
    layers = {name: algorithm(a) for name, a in assignments.items()}
    kinds = {tuple(sorted(a.items())) for a in layers.values()}
    quantization: dict[str, Any] = {
        "quant_algo": None,
        "kv_cache_quant_algo": "FP8" if kv_cache == "fp8" else None,
    }
    if len(kinds) == 1:
        quantization |= dict(kinds.pop())
    elif kinds:
        quantization |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    quantization["exclude_modules"] = _summarise(kept, assignments)
    producer = {"name": "modelopt", "version": f"nemo-build {nemo_build.__version__}"}
    return {"producer": producer, "quantization": quantization}


def quantization_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of ``config.json`` for the contents of ``hf_quant_config.json``."""
    details = config["quantization"]
    layers: Mapping[str, Mapping[str, Any]] | None = details.get("quantized_layers")
    out: dict[str, Any] = {}
    if layers is None:
        out["config_groups"] = {"group_0": {**_group(details), "targets": ["Linear"]}}
    else:
        kinds: dict[tuple[tuple[str, Any], ...], list[str]] = {}
        for name, layer in layers.items():
            kinds.setdefault(tuple(sorted(layer.items())), []).append(name)
        out["config_groups"] = {
            f"group_{i}": {**_group(dict(kind)), "targets": sorted(names)}
            for i, (kind, names) in enumerate(kinds.items())
        }
        out["quantized_layers"] = dict(layers)
    out["ignore"] = details["exclude_modules"]
    out["quant_algo"] = details["quant_algo"]
    if details["kv_cache_quant_algo"]:
        out["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return {**out, "producer": config["producer"], "quant_method": "modelopt"}


def _group(details: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of ``config_groups``, from what :func:`algorithm` says."""
    number = {"dynamic": False, "num_bits": 8 if details["quant_algo"] == "FP8" else 4, "type": "float"}
    if "group_size" in details:
        number["group_size"] = details["group_size"]
    group: dict[str, Any] = {"input_activations": dict(number), "weights": dict(number)}
    if details["quant_algo"] == "W4A16_NVFP4":
        del group["input_activations"]
    return group | {flag: details[flag] for flag in _LOW_RANK_FLAGS if flag in details}


def _summarise(kept: Iterable[str], quantized: Collection[str]) -> list[str]:
    """Modules that are kept; a layer of which nothing is quantized as one entry ``PREFIX.*``."""
    entries = set()
    for name in kept:
        parts = name.split(".")
        shortest = next(
            (
                ".".join(parts[:n])
                for n in range(1, len(parts))
                if not any(
                    q == ".".join(parts[:n]) or q.startswith(".".join(parts[:n]) + ".") for q in quantized
                )
            ),
            None,
        )
        entries.add(f"{shortest}.*" if shortest else name)
    return sorted(entries)
