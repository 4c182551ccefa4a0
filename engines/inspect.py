# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint, a model bundle or an engine holds, and on which devices it fits."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_build.bundle import ENGINE_BUNDLE, MODEL_BUNDLE, Progress, read_manifest, sha256_file
from nemo_build.engines import tensorrt_rtx
from nemo_build.engines.forecast import held_states, sizing_on
from nemo_build.engines.provenance import mismatches
from nemo_build.engines.targets import TARGETS, Target, state_types
from nemo_build.engines.tensorrt_rtx import plan_file
from nemo_build.errors import BundleError, UserError
from nemo_build.export.models import expected_tensors, model_states
from nemo_build.spec import BlockKind, ModelSpec, load_spec
from nemo_build.state import StateSpec


@dataclass(frozen=True)
class Fit:
    """What fits a device with the weights as they are stored, and states in the types that it holds them in.

    Attributes:
        target: The device.
        memory_gb: Its memory.
        context: Longest context of one sequence, up to the model's limit; 0 if the weights do not fit.
        sequences: Sequences of 8,192 positions (or the model's limit) at a time; 0 too for a model that keeps
            no state, whose sequences cost nothing.
    """

    target: str
    memory_gb: float
    context: int
    sequences: int


@dataclass(frozen=True)
class Report:
    """What :func:`inspect` finds. Sizes in bytes; "active" counts what one token uses, embedding row apart."""

    path: str
    kind: str
    architecture: str
    layers: dict[str, int]
    pattern: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    tensors: int
    parameters: int
    parameters_active: int
    parameters_mtp: int
    bytes_by_dtype: dict[str, int]
    state_per_sequence: int
    cache_per_token: int
    fits: tuple[Fit, ...]
    engine: dict[str, Any] | None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(self.bytes_by_dtype.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "weight_bytes": self.weight_bytes}


def inspect(path: Path) -> Report:
    """Look into a checkpoint, a model bundle or an engine.

    Raises:
        UserError: `path` is none of them.
        ConfigError, CheckpointError, BundleError: It is one, but damaged.
    """
    if (path / ENGINE_BUNDLE).is_file():
        return _inspect_engine(path)
    if (path / MODEL_BUNDLE).is_file():
        return _inspect_bundle(path)
    if (path / "config.json").is_file():
        return _inspect_checkpoint(path)
    raise UserError(
        f"{path} is neither a checkpoint, nor a model bundle, nor an engine.",
        hint=f"It should hold config.json, {MODEL_BUNDLE} or {ENGINE_BUNDLE}.",
    )


def verify_weights(path: Path, progress: Progress | None = None) -> None:
    """Read an engine's weights whole and compare their sha256. Raises BundleError if they differ."""
    manifest = read_manifest(path, ENGINE_BUNDLE)
    problems = []
    for name, digest in manifest["weights"]["files"].items():
        weights = path / name
        if not weights.is_file():
            problems.append(f"{weights} is missing")
        elif sha256_file(weights, progress) != digest:
            problems.append(f"{weights} is not what was built (sha256 differs)")
    if problems:
        raise BundleError("The engine's weights are damaged:", problems, "Build the engine again.")


def _inspect_engine(path: Path) -> Report:
    manifest = read_manifest(path, ENGINE_BUNDLE)
    tensors = manifest["weights"]["tensors"]
    by_dtype: Counter[str] = Counter()
    for tensor in tensors.values():
        by_dtype[tensor.get("format", tensor["dtype"]).lower()] += tensor["nbytes"]
    engine = {
        "target": manifest["target"],
        "backend": manifest["backend"],
        "options": manifest["options"],
        "plan": manifest["plan"],
        "mismatches": mismatches(manifest),
        "compiled": {name: plan.to_json() for name, plan in plan_summaries(path, manifest).items()},
    }
    spec = ModelSpec.from_json(manifest["spec"])
    return _report(path, "engine", spec, len(tensors), dict(by_dtype), engine)


def plan_summaries(path: Path, manifest: dict[str, Any]) -> dict[str, plan_file.PlanSummary]:
    """What an engine's TensorRT-RTX plans say of themselves, by graph; none of other backends.

    Raises BundleError if one is damaged or for other GPUs.
    """
    if manifest["backend"]["name"] != tensorrt_rtx.LIBRARY.name:
        return {}
    found = {}
    for name, graph in manifest["graphs"].items():
        plan_file.require_sms(path / graph["file"], tuple(manifest["backend"]["sms"]))
        found[name] = plan_file.summarize(path / graph["file"])
    return found


def _inspect_bundle(path: Path) -> Report:
    manifest = read_manifest(path, MODEL_BUNDLE)
    weights = manifest["weights"]
    spec = ModelSpec.from_json(manifest["spec"])
    return _report(path, "model bundle", spec, weights["tensors"], weights["bytes_by_dtype"], None)


def _inspect_checkpoint(path: Path) -> Report:
    from nemo_build.export.checkpoint import Checkpoint
    from nemo_build.export.ledger import reconcile

    spec = load_spec(path)
    ledger = reconcile(Checkpoint.open(path), expected_tensors(spec))
    return _report(path, "checkpoint", spec, len(ledger.entries), ledger.bytes_by_dtype, None)


def _report(
    path: Path,
    kind: str,
    spec: ModelSpec,
    tensors: int,
    by_dtype: dict[str, int],
    engine: dict[str, Any] | None,
) -> Report:
    letters = {BlockKind.MAMBA: "M", BlockKind.ATTENTION: "*", BlockKind.MOE: "E", BlockKind.MLP: "-"}
    counts = _count_parameters(spec)
    states = model_states(spec)
    everything = [s for graph in states.values() for s in graph]
    by_dtype = {name.lower(): size for name, size in sorted(by_dtype.items())}
    weight_bytes = sum(by_dtype.values())
    state = 4 * _elements(everything, context=0)
    per_token = 2 * (_elements(everything, context=1) - _elements(everything, context=0))
    limit = spec.max_positions
    return Report(
        path=str(path),
        kind=kind,
        architecture=spec.architecture,
        layers={str(k): len(spec.indices(k)) for k in BlockKind if spec.indices(k)},
        pattern="".join(letters[k] for k in spec.layers),
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        max_positions=limit,
        tensors=tensors,
        parameters=counts["total"],
        parameters_active=counts["active"],
        parameters_mtp=counts["mtp"],
        bytes_by_dtype=by_dtype,
        state_per_sequence=state,
        cache_per_token=per_token,
        fits=tuple(_fit(t, spec, everything, weight_bytes) for t in TARGETS.values() if t.memory_gb),
        engine=engine,
    )


def _count_parameters(spec: ModelSpec) -> dict[str, int]:
    """Parameters in all, of the MTP part, and those of the trunk that one token multiplies with."""
    counts = {"total": 0, "active": 0, "mtp": 0}
    routed = 0
    for name, rule in expected_tensors(spec).items():
        if rule.optional:
            continue  # scales, not parameters
        n = math.prod(rule.shape)
        counts["total"] += n
        if name.startswith("mtp."):
            counts["mtp"] += n
        elif rule.role.startswith("moe.expert."):
            routed += n
        elif rule.role != "embeddings":
            counts["active"] += n
    if spec.moe is not None:
        counts["active"] += routed * spec.moe.top_k // spec.moe.num_experts
    if spec.tie_word_embeddings:
        counts["active"] += spec.vocab_size * spec.hidden_size  # the table is the head as well
    return counts


def _elements(states: list[StateSpec], context: int) -> int:
    """Elements of one sequence's state without speculation."""
    sizes = {"slots": 1, "pending": 0, "context": context}
    return sum(math.prod(s.resolve(sizes)) for s in states)


def _fit(target: Target, spec: ModelSpec, states: list[StateSpec], weight_bytes: int) -> Fit:
    held = held_states(states, *state_types(target))
    sizing = sizing_on(target, spec, held, weight_bytes)
    sequences = sizing.most_sequences(min(8192, spec.max_positions)) if states else 0
    return Fit(target.name, target.memory_gb or 0, sizing.longest_context(), sequences)
