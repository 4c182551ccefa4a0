# SPDX-License-Identifier: Apache-2.0
"""The ModelOpt engine: the real ``mtq.quantize`` on the torch model, for algorithms that need one.

ModelOpt leaves torch patched when it fails, so each job runs in a process of its own; that process is this module
(``python -m nemo_build.export.quantize.modelopt_engine JOB``). It writes ModelOpt's own export; the caller brings
it into the same form as the streaming engine's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_build.errors import UserError
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


def quant_config(
    assignments: Mapping[str, Assignment], kv_cache: str, algorithm: str | Mapping[str, Any] | None
) -> dict[str, Any]:
    """ModelOpt's configuration for what a recipe assigns, as JSON data.

    Args:
        assignments: How each projection is stored, by its name in checkpoints.
        kv_cache: ``none`` or ``fp8``.
        algorithm: ModelOpt's calibration algorithm; ``None`` for the plain one, or the search if there is one.

    Raises:
        UserError: The scales of some projections are to be searched and of others not; ModelOpt does one of both.
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
        UserError: ModelOpt is missing, of an untested version, or fails; its last words are told.
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
    from safetensors import safe_open
    from transformers import NemotronHForCausalLM

    from nemo_build.export.quantize import modelopt_cpu

    job = json.loads(job_file.read_text(encoding="utf-8"))
    modelopt_cpu.enable()  # the model stays on the CPU, on a machine with a GPU too
    from modelopt.torch.export import export_hf_checkpoint

    source = Path(job["source"])
    model = NemotronHForCausalLM.from_pretrained(source, dtype="auto").eval()
    model.config.architectures = ["NemotronHForCausalLM"]
    limits = tuple(float(v) for v in model.config.time_step_limit)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = limits  # transformers clamps its chunked path only
    _quantize(model, job, [torch.tensor([tokens], device=model.device) for tokens in job["sequences"]])
    mtp: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            mtp |= {name: file.get_tensor(name) for name in file.keys() if name.startswith("mtp.")}  # noqa: SIM118
    export_hf_checkpoint(model, export_dir=job_file.parent, extra_state_dict=mtp)


def _quantize(model: Any, job: Mapping[str, Any], batches: Sequence[Any]) -> None:
    """Quantize the model in place, as the job says."""
    import modelopt.torch.quantization as mtq
    import torch

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
    if "recipe" in job:
        from modelopt.recipe import load_recipe

        config = load_recipe(job["recipe"]).quantize.model_dump()
    else:
        config = _restored(job["config"])
    mtq.quantize(model, config, forward_loop=forward)


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
    _main(Path(sys.argv[1]))
