# SPDX-License-Identifier: Apache-2.0
"""Export: a checkpoint becomes a model bundle, without a weight byte being copied."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from nemo_build.export.graph import GraphBuilder
from nemo_build.export.ledger import Ledger, reconcile
from nemo_build.export.models import expected_tensors, models
from nemo_build.plugins.registry import STANDARD_OPSET, register_schemas
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION
from nemo_build.spec import ModelSpec, load_spec

if TYPE_CHECKING:
    import onnx

WeightsMode = Literal["auto", "link", "reference"]

WEIGHTS_FOLDER = "weights"


@dataclass(frozen=True)
class ExportResult:
    """What an export did.

    Attributes:
        out: The bundle's directory.
        spec: The model.
        ledger: Every tensor, accounted for.
        weights: ``link`` or ``reference``.
        graphs: Node count by graph.
        unused: Names of safetensors files beside the checkpoint's that do not belong to it.
    """

    out: Path
    spec: ModelSpec
    ledger: Ledger
    weights: str
    graphs: Mapping[str, int]
    unused: tuple[str, ...]


def export_bundle(
    source: Path,
    out: Path,
    *,
    weights: WeightsMode = "auto",
    force: bool = False,
) -> ExportResult:
    """Turn a Hugging Face checkpoint into a model bundle.

    Args:
        source: Directory of the checkpoint (a hub snapshot of symbolic links will do).
        out: Directory of the bundle.
        weights: How the graphs' external data reach the checkpoint's bytes. ``link`` makes hard links to the
            shards inside the bundle; any ONNX Runtime opens such a bundle. ``reference`` only notes the
            shards' directory, which a session must be told. ``auto`` links where the file system allows it.
        force: Replace `out` if it is a bundle.

    Raises:
        ConfigError: The configuration cannot be honoured.
        CheckpointError: Tensors are missing, unexpected or wrong.
        UserError: `out` exists or cannot be written, or the shards cannot be linked or referenced.
    """
    require_output(out, force=force, source=source)
    spec = load_spec(source)
    checkpoint = Checkpoint.open(source)
    ledger = reconcile(checkpoint, expected_tensors(spec))
    with publish(out) as directory:
        mode, folder, locate = _place_weights(checkpoint, directory, out, weights)
        graphs = {}
        for name, module in models().items():
            if module.applies(spec):
                graphs[name] = _write_graph(directory, name, module, spec, checkpoint, locate)
        manifest = {
            "nemo_build": nemo_build.__version__,
            "opsets": {"ai.onnx": STANDARD_OPSET, DOMAIN: OPSET_VERSION},
            "checkpoint": {
                "digest": checkpoint.digest,
                "files": {
                    name: {"size": shard.size, "header_sha256": shard.header_digest}
                    for name, shard in sorted(checkpoint.files.items())
                },
            },
            "weights": {
                "mode": mode,
                "folder": folder,
                "tensors": len(ledger.entries),
                "bytes_by_dtype": ledger.bytes_by_dtype,
            },
            "spec": spec.to_json(),
            "graphs": graphs,
            "files": copy_files(source, directory, text_files(source)),
        }
        write_manifest(directory, MODEL_BUNDLE, manifest)
    nodes = {name: g["nodes"] for name, g in graphs.items()}
    return ExportResult(out, spec, ledger, mode, nodes, checkpoint.unused)


def _write_graph(
    directory: Path,
    name: str,
    module: Any,
    spec: ModelSpec,
    checkpoint: Checkpoint,
    locate: Callable[[TensorInfo], str],
) -> dict[str, Any]:
    """Build, check and write one graph; returns its manifest entry."""
    import onnx_ir as ir

    g = GraphBuilder(name, checkpoint.tensors, locate)
    module.build(g, spec)
    state = [s.to_json() for s in g.states]
    model = g.finish(
        {
            "nemo_build.version": nemo_build.__version__,
            "nemo_build.graph": name,
            "nemo_build.checkpoint_digest": checkpoint.digest,
            "nemo_build.spec": json.dumps(spec.to_json()),
            "nemo_build.state": json.dumps(state),
        }
    )
    proto = ir.serde.serialize_model(model)
    _check(proto)
    path = directory / f"{name}.onnx"
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


def _place_weights(
    checkpoint: Checkpoint, directory: Path, out: Path, wanted: WeightsMode
) -> tuple[str, str | None, Callable[[TensorInfo], str]]:
    """Make the shards reachable; returns the mode, the folder to tell a session, and the locations."""
    if wanted in ("auto", "link"):
        try:
            (directory / WEIGHTS_FOLDER).mkdir()
            for name, shard in checkpoint.files.items():
                os.link(shard.path_real, directory / WEIGHTS_FOLDER / name)
            return "link", None, lambda info: f"{WEIGHTS_FOLDER}/{info.file}"
        except OSError as error:
            if wanted == "link":
                raise UserError(
                    f"Cannot hard-link the checkpoint's shards into {out}: {error.strerror}.",
                    hint="Write the bundle to the checkpoint's file system, or pass --weights reference.",
                ) from error
            for leftover in (directory / WEIGHTS_FOLDER).iterdir():
                leftover.unlink()
            (directory / WEIGHTS_FOLDER).rmdir()
    real = {name: shard.path_real for name, shard in checkpoint.files.items()}
    return "reference", str(checkpoint.folder()), lambda info: real[info.file].name
