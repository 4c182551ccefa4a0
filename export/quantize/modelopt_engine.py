# SPDX-License-Identifier: Apache-2.0
"""The ModelOpt engine: the real ``mtq.quantize`` on the torch model, for algorithms that need one.

ModelOpt leaves torch patched when it fails, so each job runs in a process of its own; that process is this module
(``python -m nemo_build.export.quantize.modelopt_engine JOB``). It writes ModelOpt's own export; the caller brings
it into the same form as the streaming engine's. What is wrong with a job it writes beside that.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_build.bundle import read_json, write_json
from nemo_build.errors import UserError
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.quantize.recipe import WEIGHTS, Assignment, Recipe

_NUMERICS: Mapping[tuple[str, bool], dict[str, Any]] = {
    ("fp8", False): {"num_bits": [4, 3]},
    ("fp8", True): {"num_bits": [4, 3]},
    ("nvfp4", False): {
        "num_bits": [2, 1],
        "block_sizes": {"-1": 16, "type": "dynamic", "scale_bits": [4, 3]},
    },
    ("nvfp4", True): {
        "num_bits": [2, 1],
        "block_sizes": {"-1": 16, "type": "static", "scale_bits": [4, 3], "four_over_six": True},
    },
}
"""ModelOpt's description of each (format, search)."""

_SEARCH = {
    "method": "mse",
    "fp8_scale_sweep": False,
    "start_multiplier": 1.0,
    "stop_multiplier": 1.5,
    "step_size": 0.5,
}

_NOT_STORED = {
    "awq_full": "awq_full clips the weights as they are smoothed, and the clipping is lost where that is folded; "
    "awq_lite and awq_clip can be stored",
}
"""Algorithms of ModelOpt's whose result the layout has no place for, and why."""

_ALONE = {
    "awq_lite": "it is folded into the original weights",
    "smoothquant": "it is folded into the original weights",
    "svdquant": "no other knows of its low-rank terms",
}
"""Algorithms that smooth inputs, and why each goes with no other."""

_REFUSAL = "refusal.json"


def quant_config(
    assignments: Mapping[str, Assignment], kv_cache: str, algorithm: str | Mapping[str, Any] | None
) -> dict[str, Any]:
    """ModelOpt's configuration for what a recipe assigns, as JSON data.

    Args:
        assignments: How each projection is stored, by its name in checkpoints.
        kv_cache: ``none`` or ``fp8``.
        algorithm: ModelOpt's calibration algorithm; ``None`` for the plain one, or the search if there is one.

    Raises:
        UserError: The scales of some projections are to be searched and of others not, where ModelOpt does one of
            both; or the algorithm does not go with a search.
    """
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name, a in assignments.items():
        numerics = _NUMERICS[a.format, a.search]
        weights, inputs = _quantizers(name)
        entries.append({"quantizer_name": weights, "enable": True, "cfg": numerics})
        if a.activations:
            plain = _NUMERICS[a.format, False]
            entries.append({"quantizer_name": inputs, "enable": True, "cfg": plain})
    if kv_cache == "fp8":
        entries.append({"quantizer_name": "*[kv]_bmm_quantizer", "enable": True, "cfg": {"num_bits": [4, 3]}})
    searched = {a.search for a in assignments.values()}
    if algorithm is None and len(searched) > 1:
        raise UserError("ModelOpt searches the scales of all projections or of none; the recipe has both.")
    method = algorithm.get("method") if isinstance(algorithm, Mapping) else algorithm
    if method in _ALONE and any(a.search and a.format == "nvfp4" for a in assignments.values()):
        raise UserError(
            f"ModelOpt's {method} has no four-over-six.", hint="Say `weights: nvfp4` in the recipe."
        )
    if algorithm is None:
        algorithm = _SEARCH if searched == {True} else "max"
    return {"quant_cfg": entries, "algorithm": algorithm}


def run(
    source: Path,
    out: Path,
    recipe: Recipe,
    assignments: Mapping[str, Assignment],
    sequences: Sequence[Sequence[int]],
) -> None:
    """Quantize with ModelOpt in a process of its own and write its export.

    Args:
        source: The unquantized checkpoint.
        out: Directory of ModelOpt's export; made if need be.
        recipe: The recipe.
        assignments: What its rules assign; empty for recipes without rules.
        sequences: Token ids to calibrate on.

    Raises:
        UserError: ModelOpt is missing, of an untested version, or fails (its last words are told), or its algorithm
            gives what cannot be stored.
    """
    out.mkdir(parents=True, exist_ok=True)
    job = out / "job.json"
    content: dict[str, Any] = {"source": str(source), "sequences": [list(s) for s in sequences]}
    if recipe.modelopt:
        content["recipe"] = recipe.modelopt
    elif recipe.auto:
        formats = [_NUMERICS[WEIGHTS[name]] for name in recipe.auto["formats"]]
        content["auto"] = {"effective_bits": recipe.auto["effective_bits"], "formats": formats}
    else:
        content["config"] = quant_config(assignments, recipe.kv_cache, recipe.algorithm)
    job.write_text(json.dumps(content), encoding="utf-8")
    command = [sys.executable, "-m", __name__, str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    job.unlink()
    refusal = read_json(out / _REFUSAL)
    if refusal:
        raise UserError(**refusal)
    if done.returncode:
        words = [line for line in done.stderr.splitlines() if line.strip()][-6:]
        raise UserError("ModelOpt failed; its last words were:", words)


def _quantizers(name: str) -> tuple[str, str]:
    """Names of the weight and input quantizers of a projection; transformers fuses experts and renames layers."""
    module = name.replace("backbone.", "model.", 1)
    prefix, dot, rest = module.partition(".experts.")
    if not dot:
        return f"{module}.weight_quantizer", f"{module}.input_quantizer"
    expert, projection = rest.split(".")
    return (
        f"{prefix}.experts.{projection}_weight_quantizers.{expert}",
        f"{prefix}.experts.{projection}_input_quantizer",
    )


def _main(job_file: Path) -> None:
    import torch
    from transformers import NemotronHForCausalLM

    from nemo_build.export.quantize import modelopt_cpu, modelopt_lowrank, modelopt_smoothing

    job = json.loads(job_file.read_text(encoding="utf-8"))
    modelopt_cpu.enable()  # the model stays on the CPU, on a machine with a GPU too
    from modelopt.torch.export import export_hf_checkpoint

    if "auto" not in job:
        _require_storable(_configuration(job)["algorithm"])
    source = Checkpoint.open(Path(job["source"]))
    model = NemotronHForCausalLM.from_pretrained(source.directory, dtype="auto").eval()
    model.config.architectures = ["NemotronHForCausalLM"]
    limits = tuple(float(v) for v in model.config.time_step_limit)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = limits  # transformers clamps its chunked path only
    _quantize(model, job, [torch.tensor([tokens], device=model.device) for tokens in job["sequences"]])
    modelopt_smoothing.fold(model, lambda name: _tensor(source, name.replace("model.", "backbone.", 1)))
    mtp = {name: _tensor(source, name) for name in source.tensors if name.startswith("mtp.")}
    with modelopt_lowrank.exportable(model):
        export_hf_checkpoint(model, export_dir=job_file.parent, extra_state_dict=mtp)


def _tensor(checkpoint: Checkpoint, name: str) -> Any:
    """A tensor of the checkpoint, for torch."""
    from safetensors import safe_open

    with safe_open(checkpoint.files[checkpoint.tensors[name].file].path_real, "pt") as file:
        return file.get_tensor(name)


def _configuration(job: Mapping[str, Any]) -> dict[str, Any]:
    """What the job says in the words of ``mtq.quantize``."""
    from modelopt.recipe import load_recipe

    found = load_recipe(job["recipe"]).quantize.model_dump() if "recipe" in job else _restored(job["config"])
    return dict(found)


def _require_storable(algorithm: Any) -> None:
    """Refuse, before the work, an algorithm whose result cannot be stored."""
    steps = algorithm if isinstance(algorithm, (list, tuple)) else [algorithm]
    methods = [step.get("method") if isinstance(step, dict) else step for step in steps]
    problems = [_NOT_STORED[method] for method in methods if method in _NOT_STORED]
    if len(methods) > 1:
        problems += [
            f"{method} goes with no other algorithm: {_ALONE[method]}"
            for method in methods
            if method in _ALONE
        ]
    if problems:
        raise UserError("What the recipe's algorithm gives cannot be stored:", problems)


def _quantize(model: Any, job: Mapping[str, Any], batches: Sequence[Any]) -> None:
    """Quantize the model in place, as the job says."""
    import modelopt.torch.quantization as mtq
    import torch

    from nemo_build.export.quantize import modelopt_lowrank

    def forward(module: Any) -> None:
        with torch.no_grad():
            for ids in batches:
                module(ids, use_cache=False)

    if "auto" in job:
        mtq.auto_quantize(
            model,
            constraints={"effective_bits": job["auto"]["effective_bits"]},
            quantization_formats=[_format_config(numerics) for numerics in job["auto"]["formats"]],
            data_loader=list(batches),
            forward_step=lambda module, ids: module(ids, use_cache=False).logits,
            disabled_layers=["*conv1d*", "*gate*", "*lm_head*"],
            method="kl_div",
        )
        return
    config = _configuration(job)
    mtq.quantize(model, {**config, "algorithm": None})  # the quantizers alone
    mtq.calibrate(model, modelopt_lowrank.restricted(model, config["algorithm"]), forward_loop=forward)


def _format_config(numerics: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that stores all weights in one format and rounds inputs to it, for auto_quantize."""
    cfg = _restored(dict(numerics))
    entries = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer*", "enable": True, "cfg": cfg},
        {"quantizer_name": "*input_quantizer", "enable": True, "cfg": cfg},
    ]
    return {"quant_cfg": entries, "algorithm": "max"}


def _restored(value: Any) -> Any:
    """Undo what JSON does to ModelOpt's configuration: integer keys and tuples."""
    if isinstance(value, dict):
        return {(-1 if k == "-1" else k): _restored(v) for k, v in value.items()}
    if isinstance(value, list) and all(isinstance(v, int) for v in value):
        return tuple(value)
    return [_restored(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    _job = Path(sys.argv[1])
    try:
        _main(_job)
    except UserError as _error:
        write_json(_job.with_name(_REFUSAL), vars(_error))  # what UserError is made of; run() raises it again
