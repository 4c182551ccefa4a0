# SPDX-License-Identifier: Apache-2.0
"""Export: a checkpoint, and drafters' if asked, become a model bundle, without a weight byte being copied."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nemo_build
from nemo_build.bundle import (
    MODEL_BUNDLE,
    copy_files,
    publish,
    require_output,
    sha256_file,
    text_files,
    write_manifest,
)
from nemo_build.errors import UserError
from nemo_build.export.checkpoint import Checkpoint, TensorInfo
from nemo_build.export.drafters import drafter_graphs, drafter_tensors
from nemo_build.export.drafters.block import EMBEDDINGS, HEAD
from nemo_build.export.graph import GraphBuilder
from nemo_build.export.ledger import Ledger, reconcile
from nemo_build.export.models import GraphOptions, expected_tensors, models
from nemo_build.export.placement import WeightsMode, place_weights
from nemo_build.plugins.registry import STANDARD_OPSET, register_schemas
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION
from nemo_build.spec import ModelSpec, load_spec
from nemo_build.spec_draft import DraftSpec, load_draft

if TYPE_CHECKING:
    import onnx

__all__ = ["Drafter", "ExportResult", "WeightsMode", "export_bundle"]


@dataclass(frozen=True)
class Drafter:
    """A drafter's spec, its checkpoint, and the ledger of the tensors in it."""

    spec: DraftSpec
    checkpoint: Checkpoint
    ledger: Ledger


@dataclass(frozen=True)
class ExportResult:
    """What an export did.

    Attributes:
        out: The bundle's directory.
        spec: The model.
        ledger: Every tensor of its checkpoint, accounted for.
        weights: ``link`` or ``reference``.
        graphs: Node count by graph.
        unused: Names of safetensors files beside the checkpoint's that do not belong to it.
        drafters: The drafters by kind.
    """

    out: Path
    spec: ModelSpec
    ledger: Ledger
    weights: str
    graphs: Mapping[str, int]
    unused: tuple[str, ...]
    drafters: Mapping[str, Drafter]


def export_bundle(
    source: Path,
    out: Path,
    *,
    weights: WeightsMode = "auto",
    force: bool = False,
    drafts: Sequence[Path] = (),
    options: GraphOptions | None = None,
) -> ExportResult:
    """Turn a Hugging Face checkpoint into a model bundle.

    Args:
        source: Directory of the checkpoint (a hub snapshot of symbolic links will do).
        out: Directory of the bundle.
        weights: How the graphs' external data reach the checkpoints' bytes. ``link`` makes hard links to the
            shards inside the bundle; any ONNX Runtime opens such a bundle. ``reference`` only notes the
            shards' directory, which a session must be told. ``auto`` links where the file system allows it.
        force: Replace `out` if it is a bundle.
        drafts: Directories of drafters' checkpoints, at most one a kind.
        options: Choices about the graphs; its taps are replaced by those of the drafters.

    Raises:
        ConfigError: A configuration cannot be honoured.
        CheckpointError: Tensors are missing, unexpected or wrong.
        UserError: `out` exists or cannot be written, the shards cannot be linked or referenced, or two drafters are
            of one kind.
    """
    for path in (source, *drafts):
        require_output(out, force=force, source=path)
    spec = load_spec(source)
    checkpoint = Checkpoint.open(source)
    ledger = reconcile(checkpoint, expected_tensors(spec))
    drafters = _open_drafters(drafts, spec)
    options = replace(options or GraphOptions(), taps=_taps(drafters.values()))
    with publish(out) as directory:
        sources = {"": checkpoint, **{kind: d.checkpoint for kind, d in drafters.items()}}
        placed = place_weights(sources, directory, out, weights)
        bundle = _Bundle(directory, spec, checkpoint.digest, placed.tensors)
        graphs = {
            name: bundle.write(name, module.build, options)
            for name, module in models().items()
            if module.applies(spec)
        }
        described = {}
        for kind, drafter in drafters.items():
            added = bundle.write_drafter(drafter, options.taps)
            graphs |= added
            described[kind] = _describe_drafter(drafter, list(added))
        manifest = {
            "nemo_build": nemo_build.__version__,
            "opsets": {"ai.onnx": STANDARD_OPSET, DOMAIN: OPSET_VERSION},
            "checkpoint": _describe_checkpoint(checkpoint),
            "weights": {"mode": placed.mode, "folder": placed.folder, **_describe_tensors(ledger)},
            "spec": spec.to_json(),
            "graph_options": options.to_json(),
            "graphs": graphs,
            "drafters": described,
            "files": copy_files(source, directory, text_files(source)),
        }
        write_manifest(directory, MODEL_BUNDLE, manifest)
    nodes = {name: g["nodes"] for name, g in graphs.items()}
    return ExportResult(out, spec, ledger, placed.mode, nodes, checkpoint.unused, drafters)


def _open_drafters(paths: Iterable[Path], target: ModelSpec) -> dict[str, Drafter]:
    """Read and check the drafters' checkpoints; by kind."""
    found: dict[str, Drafter] = {}
    for path in paths:
        spec = load_draft(path, target)
        checkpoint = Checkpoint.open(path)
        if spec.own_embeddings is None:
            spec = replace(spec, own_embeddings=f"{EMBEDDINGS}.weight" in checkpoint.tensors)
        if spec.own_head is None:
            spec = replace(spec, own_head=f"{HEAD}.weight" in checkpoint.tensors)
        if spec.kind in found:
            both = [str(found[spec.kind].checkpoint.directory), str(path)]
            raise UserError(f"A bundle has one {spec.kind} drafter at most:", both, "Give one of them.")
        found[spec.kind] = Drafter(spec, checkpoint, reconcile(checkpoint, drafter_tensors(spec)))
    return found


def _taps(drafters: Iterable[Drafter]) -> tuple[int, ...]:
    """The layers that the target's taps come from: the first drafter's in its order, then what others add."""
    return tuple(dict.fromkeys(tap for d in drafters for tap in d.spec.taps))


def _describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    files = {
        name: {"size": shard.size, "header_sha256": shard.header_digest}
        for name, shard in sorted(checkpoint.files.items())
    }
    return {"digest": checkpoint.digest, "files": files}


def _describe_tensors(ledger: Ledger) -> dict[str, Any]:
    return {
        "tensors": len(ledger.entries),
        "bytes_by_dtype": ledger.bytes_by_dtype,
        "bytes_by_role": ledger.bytes_by_format,
    }


def _describe_drafter(drafter: Drafter, graphs: list[str]) -> dict[str, Any]:
    """A drafter's part of the manifest."""
    return {
        "checkpoint": _describe_checkpoint(drafter.checkpoint),
        "weights": _describe_tensors(drafter.ledger),
        "spec": drafter.spec.to_json(),
        "graphs": graphs,
    }


@dataclass(frozen=True)
class _Bundle:
    """Writes graphs into a bundle's directory. The tensors' ``file`` is their external-data location."""

    directory: Path
    spec: ModelSpec
    digest: str
    tensors: Mapping[str, TensorInfo]

    def write_drafter(self, drafter: Drafter, taps: Sequence[int]) -> dict[str, dict[str, Any]]:
        """Write a drafter's graphs; returns their manifest entries."""
        metadata = {
            "nemo_build.draft": json.dumps(drafter.spec.to_json()),
            "nemo_build.draft_digest": drafter.checkpoint.digest,
        }
        return {
            name: self.write(name, module.build, drafter.spec, taps, metadata=metadata)
            for name, module in drafter_graphs(drafter.spec).items()
        }

    def write(
        self,
        name: str,
        build: Callable[..., None],
        *arguments: object,
        metadata: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Build, check and write one graph; returns its manifest entry."""
        import onnx_ir as ir

        g = GraphBuilder(name, self.tensors, lambda info: info.file)
        build(g, self.spec, *arguments)
        state = [s.to_json() for s in g.states]
        model = g.finish(
            {
                "nemo_build.version": nemo_build.__version__,
                "nemo_build.graph": name,
                "nemo_build.checkpoint_digest": self.digest,
                "nemo_build.spec": json.dumps(self.spec.to_json()),
                "nemo_build.state": json.dumps(state),
                **(metadata or {}),
            }
        )
        proto = ir.serde.serialize_model(model)
        _check(proto)
        path = self.directory / f"{name}.onnx"
        path.write_bytes(proto.SerializeToString(deterministic=True))
        return {
            "file": path.name,
            "sha256": sha256_file(path),
            "nodes": len(model.graph),
            "inputs": [v.name for v in model.graph.inputs],
            "outputs": [v.name for v in model.graph.outputs],
            "state": state,
        }


def _check(proto: onnx.ModelProto) -> None:
    """Run ``onnx.checker`` on the graph, its functions and the types of the custom ops' inputs.

    The checker would look for external data below the working directory, and refuses files with several
    hard links; so it sees the weights as inputs.
    """
    import onnx

    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    for tensor in proto.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            shown.graph.input.append(
                onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
            )
    kept = [t for t in proto.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    del shown.graph.initializer[:]
    shown.graph.initializer.extend(kept)
    register_schemas()
    onnx.checker.check_model(shown, full_check=True, check_custom_domain=True)
