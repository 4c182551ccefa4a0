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
from nemo_build.export.quantize.recipe import Assignment

_NUMERICS: Mapping[tuple[str, bool], dict[str, Any]] = {
    ("fp8", False): {"num_bits": [4, 3]},
    ("nvfp4", False): {
        "num_bits": [2, 1],
        "block_sizes": {"-1": 16, "type": "dynamic", "scale_bits": [4, 3]},
    },
    ("nvfp4", True): {
        "num_bits": [2, 1],
        "block_sizes": {"-1": 16, "type": "static", "scale_bits": [4, 3], "four_over_six": True},
    },
}
"""ModelOpt's description of each (format, four-over-six)."""

_FOUR_OVER_SIX = {
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
        algorithm: ModelOpt's calibration algorithm; ``None`` for the plain one.
    """
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for name, a in assignments.items():
        numerics = _NUMERICS[a.format, a.four_over_six]
        weights, inputs = _quantizers(name)
        entries.append({"quantizer_name": weights, "enable": True, "cfg": numerics})
        if a.activations:
            plain = _NUMERICS[a.format, False]
            entries.append({"quantizer_name": inputs, "enable": True, "cfg": plain})
    if kv_cache == "fp8":
        entries.append({"quantizer_name": "*[kv]_bmm_quantizer", "enable": True, "cfg": {"num_bits": [4, 3]}})
    if algorithm is None:
        algorithm = _FOUR_OVER_SIX if any(a.four_over_six for a in assignments.values()) else "max"
    return {"quant_cfg": entries, "algorithm": algorithm}


def run(
    source: Path,
    out: Path,
    config: Mapping[str, Any],
    sequences: Sequence[Sequence[int]],
    *,
    dtype: str = "auto",
) -> None:
    """Quantize with ModelOpt in a process of its own and write its export.

    Args:
        source: The unquantized checkpoint.
        out: Directory of ModelOpt's export; made if need be.
        config: What :func:`quant_config` returns.
        sequences: Token ids to calibrate on.
        dtype: Torch dtype to compute in; ``auto`` is the checkpoint's.

    Raises:
        UserError: ModelOpt is missing, of an untested version, or fails; its last words are told.
    """
    out.mkdir(parents=True, exist_ok=True)
    job = out / "job.json"
    job.write_text(
        json.dumps(
            {
                "source": str(source),
                "config": config,
                "sequences": [list(s) for s in sequences],
                "dtype": dtype,
            }
        ),
        encoding="utf-8",
    )
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
    if not torch.cuda.is_available():
        modelopt_cpu.enable()
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    source = Path(job["source"])
    model = NemotronHForCausalLM.from_pretrained(source, dtype=job["dtype"]).eval()
    model.config.architectures = ["NemotronHForCausalLM"]
    low, high = (float(v) for v in model.config.time_step_limit)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (low, high)  # transformers clamps its chunked path only

    def forward(module: torch.nn.Module) -> None:
        with torch.no_grad():
            for tokens in job["sequences"]:
                module(torch.tensor([tokens], device=model.device), use_cache=False)

    mtq.quantize(model, _restored(job["config"]), forward_loop=forward)
    mtp: dict[str, torch.Tensor] = {}
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            mtp |= {name: file.get_tensor(name) for name in file.keys() if name.startswith("mtp.")}  # noqa: SIM118
    export_hf_checkpoint(model, export_dir=job_file.parent, extra_state_dict=mtp)


def _restored(value: Any) -> Any:
    """Undo what JSON does to ModelOpt's configuration: integer keys and tuples."""
    if isinstance(value, dict):
        return {(-1 if k == "-1" else k): _restored(v) for k, v in value.items()}
    if isinstance(value, list) and all(isinstance(v, int) for v in value):
        return tuple(value)
    return [_restored(v) for v in value] if isinstance(value, list) else value


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
