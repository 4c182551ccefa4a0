# SPDX-License-Identifier: Apache-2.0
"""What changed from one engine, model bundle or checkpoint to another of its kind.

Structure and provenance, from manifests, graphs and safetensors headers; no weight is read, so weights that differ in
value alone are seen by their digests (of an engine's file, not of each tensor). How much a difference matters to the
logits is what :mod:`nemo_build.engines.compare` measures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nemo_build.bundle import (
    ENGINE_BUNDLE,
    FORMAT_VERSION,
    MODEL_BUNDLE,
    read_manifest,
    sha256_file,
    text_files,
)
from nemo_build.engines.inspect import plan_summaries
from nemo_build.engines.tensorrt_rtx.plan_file import PlanSummary
from nemo_build.errors import UserError
from nemo_build.export.names import collapse
from nemo_build.plugins.formats import format_of

T = TypeVar("T")

ABSENT = None
"""Stands for a value that one side does not have."""


@dataclass(frozen=True)
class StoredAs:
    """How a tensor is stored: its format (or dtype), its shape, and its bytes."""

    form: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.form} {list(self.shape)}"


@dataclass(frozen=True)
class Subject:
    """One side of a comparison.

    Attributes:
        path: Where it is.
        kind: ``engine``, ``model bundle`` or ``checkpoint``.
        facts: Values by section and dotted name: specs, options, versions, provenance, sizes, digests.
        nodes: For each graph, its nodes by op.
        operations: For each compiled graph, what it launches, by name.
        precisions: For each compiled graph, the types that a layer multiplies, by layer.
        tensors: The weights by name.
    """

    path: Path
    kind: str
    facts: Mapping[str, Mapping[str, Any]]
    nodes: Mapping[str, Mapping[str, int]]
    tensors: Mapping[str, StoredAs]
    operations: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    precisions: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A value that differs; ``None`` on the side that has none."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class TensorChange:
    """Tensors or layers that changed alike: their names as a range, how many they are, and what they were and are.

    Of a tensor that is how it is stored, of a layer what types it multiplies; "" is for none.
    """

    names: str
    count: int
    before: str
    after: str


@dataclass(frozen=True)
class Difference:
    """What changed.

    Attributes:
        before: The first path.
        after: The second.
        kind: What both are.
        facts: Changed values by section; sections without any are left out.
        nodes: Changed numbers of nodes by graph; the changes' names are ops.
        operations: Changed numbers of launches by compiled graph; the names are those of kernels and fusions.
        precisions: Layers by compiled graph that multiply other types.
        tensors: Changed weights.
        formats: Bytes by format, all of them, changed or not.
    """

    before: str
    after: str
    kind: str
    facts: dict[str, list[Change]]
    nodes: dict[str, list[Change]]
    operations: dict[str, list[Change]]
    precisions: dict[str, list[TensorChange]]
    tensors: list[TensorChange]
    formats: list[Change]

    @property
    def equal(self) -> bool:
        """Whether nothing changed."""
        return not (self.facts or self.nodes or self.operations or self.precisions or self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"equal": self.equal, **asdict(self)}


def diff(before: Path, after: Path) -> Difference:
    """Compare two engines, two model bundles or two checkpoints.

    Raises:
        UserError: They are not of one kind, or one is nothing of ours.
        BundleError, CheckpointError: One is damaged.
    """
    a, b = _open(before), _open(after)
    if a.kind != b.kind:
        raise UserError("Only two of a kind can be compared:", [f"{s.path}: {s.kind}" for s in (a, b)])
    return Difference(
        str(before),
        str(after),
        a.kind,
        _by_name(a.facts, b.facts, _changes),
        _by_name(a.nodes, b.nodes, _changes),
        _by_name(a.operations, b.operations, _changes),
        _by_name(a.precisions, b.precisions, _alike),
        _alike(a.tensors, b.tensors),
        _changes(_by_format(a.tensors), _by_format(b.tensors), all_of_them=True),
    )


def _by_name(
    a: Mapping[str, Mapping[str, Any]],
    b: Mapping[str, Mapping[str, Any]],
    compare: Callable[[Mapping[str, Any], Mapping[str, Any]], list[T]],
) -> dict[str, list[T]]:
    """What changed in each section or graph; those in which nothing did are left out."""
    found = {name: compare(a.get(name, {}), b.get(name, {})) for name in {**a, **b}}
    return {name: changes for name, changes in found.items() if changes}


def _open(path: Path) -> Subject:
    """What is at a path."""
    for file, kind in KINDS.items():
        if (path / file).is_file():
            return kind(path)
    raise UserError(
        f"{path} is neither an engine, nor a model bundle, nor a checkpoint.",
        hint=f"It should hold {', '.join(KINDS)}.",
    )


def _engine(path: Path) -> Subject:
    manifest = read_manifest(path, ENGINE_BUNDLE)
    facts = {
        "options": _flat({"target": manifest["target"], **manifest["options"]}),
        "versions": _versions(manifest, "backend", "kernels"),
        "provenance": _flat(manifest.get("inputs", {})),
        "plan": _flat(manifest["plan"]),
        "sizes": _flat(manifest["sizes"]),
        "contents": dict(manifest["weights"]["files"]),
        **_described(manifest),
    }
    tensors = {
        name: StoredAs(t.get("format", t["dtype"]).lower(), tuple(t["shape"]), t["nbytes"])
        for name, t in manifest["weights"].get("tensors", {}).items()
    }
    plans = plan_summaries(path, manifest)
    return Subject(
        path,
        "engine",
        facts,
        _nodes(_models(path, manifest)),
        tensors,
        {name: _operations(plan) for name, plan in plans.items()},
        {name: plan.precisions for name, plan in plans.items()},
    )


def _operations(plan: PlanSummary) -> dict[str, int]:
    """What a plan launches, by name."""
    products = plan.products - sum(plan.fusions.values())
    kernels = {f"kernel {name}": count for name, count in plan.launches.items()}
    fusions = {f"fused product {name}": count for name, count in plan.fusions.items()}
    return kernels | fusions | ({"product": products} if products else {})


def _bundle(path: Path) -> Subject:
    from nemo_build.engines.weights import stored_tensors

    manifest = read_manifest(path, MODEL_BUNDLE)
    checkpoints = {"checkpoint": manifest["checkpoint"]}
    checkpoints |= {kind: d["checkpoint"] for kind, d in manifest["drafters"].items()}
    facts = {
        "versions": _versions(manifest, "opsets"),
        "provenance": _flat(checkpoints),
        "options": _flat({"weights": manifest["weights"]["mode"]}),
        **_described(manifest),
    }
    models = _models(path, manifest)
    stored = stored_tensors(models.values())
    tensors = {name: StoredAs(_form(name, t.dtype), t.shape, t.nbytes) for name, t in stored.items()}
    return Subject(path, "model bundle", facts, _nodes(models), tensors)


def _checkpoint(path: Path) -> Subject:
    from nemo_build.export.checkpoint import Checkpoint
    from nemo_build.spec import load_spec

    checkpoint = Checkpoint.open(path)
    facts = {
        "provenance": {
            "digest": checkpoint.digest,
            **{f"shards.{name}.size": shard.size for name, shard in checkpoint.files.items()},
            **{
                f"shards.{name}.header_sha256": shard.header_digest
                for name, shard in checkpoint.files.items()
            },
        },
        "spec": _spec(load_spec(path).to_json()),
        "files": {name: sha256_file(path / name) for name in text_files(path)},
    }
    tensors = {
        name: StoredAs(_form(name, t.dtype), t.shape, t.nbytes) for name, t in checkpoint.tensors.items()
    }
    return Subject(path, "checkpoint", facts, {}, tensors)


KINDS: Mapping[str, Callable[[Path], Subject]] = {
    ENGINE_BUNDLE: _engine,
    MODEL_BUNDLE: _bundle,
    "config.json": _checkpoint,
}
"""What can be compared, by the file that it is recognised by; bundles hold a ``config.json`` as well."""


def _versions(manifest: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Versions of what made a bundle; older ones lack some."""
    found = {"nemo_build": manifest.get("nemo_build"), "format": FORMAT_VERSION}
    return found | _flat({name: manifest[name] for name in more if name in manifest})


def _described(manifest: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections that engines and model bundles have alike."""
    drafters = {kind: d["spec"] for kind, d in manifest["drafters"].items()}
    graphs = {
        f"{name}.{key}": value for name, g in manifest["graphs"].items() for key, value in _graph(g).items()
    }
    return {
        "spec": _spec(manifest["spec"]),
        "drafters": _flat(drafters),
        "graph options": _flat(manifest["graph_options"]),
        "graphs": graphs,
        "files": dict(manifest["files"]),
    }


def _spec(data: Mapping[str, Any]) -> dict[str, Any]:
    """A model's spec, with each layer by its number."""
    return _flat({**data, "layers": {str(i): kind for i, kind in enumerate(data["layers"])}})


def _graph(entry: Mapping[str, Any]) -> dict[str, Any]:
    """What is said of a graph: digest, inputs, outputs, scratch memory, and its state buffers as one line each."""
    said = {key: entry[key] for key in ("sha256", "inputs", "outputs", "scratch") if key in entry}
    states = {f"state.{s['name']}": f"{s['dtype']} {s['shape']}" for s in entry.get("state", ())}
    return {**said, **states}


def _models(path: Path, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The graphs that are ONNX, without their weights."""
    import onnx

    return {
        name: onnx.load(path / g["file"], load_external_data=False)
        for name, g in manifest["graphs"].items()
        if str(g["file"]).endswith(".onnx")
    }


def _nodes(models: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Nodes by op of each graph."""
    return {
        name: dict(Counter(f"{n.domain}.{n.op_type}".lstrip(".") for n in model.graph.node))
        for name, model in models.items()
    }


def _form(name: str, dtype: str) -> str:
    """The format of a stored weight, or the dtype of any other tensor."""
    stored = format_of(dtype) if name.endswith(".weight") else None
    return dtype.lower() if stored is None or dtype in ("BF16", "F16", "F32") else str(stored.NAME)


def _flat(value: object, prefix: str = "") -> dict[str, Any]:
    """Nested data by dotted names; lists of plain values stay whole."""
    if isinstance(value, Mapping):
        nested = [_flat(v, f"{prefix}.{k}" if prefix else str(k)) for k, v in value.items()]
        return {name: v for part in nested for name, v in part.items()}
    return {prefix: value}


def _changes(a: Mapping[str, Any], b: Mapping[str, Any], *, all_of_them: bool = False) -> list[Change]:
    changes = [Change(name, a.get(name, ABSENT), b.get(name, ABSENT)) for name in {**a, **b}]
    return [c for c in changes if all_of_them or c.before != c.after]


def _by_format(tensors: Mapping[str, StoredAs]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for tensor in tensors.values():
        totals[tensor.form] += tensor.nbytes
    return dict(totals.most_common())


def _alike(a: Mapping[str, object], b: Mapping[str, object]) -> list[TensorChange]:
    """What differs, or is on one side only; tensors or layers that changed alike in one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in {**a, **b}:
        pair = tuple(str(side[name]) if name in side else "" for side in (a, b))
        if pair[0] != pair[1]:
            groups.setdefault((pair[0], pair[1]), []).append(name)
    return [
        TensorChange(text, count, before, after)
        for (before, after), names in groups.items()
        for text, count in collapse(names)
    ]
