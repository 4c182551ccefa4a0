# SPDX-License-Identifier: Apache-2.0
"""What a graph computes on its way: an ONNX graph run on the CPU with all values between its nodes as outputs.

Nodes keep their names from export through build, so values of two engines, or of an engine and the model bundle that it
was built from, belong together if they have one name.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.bundle import ENGINE_BUNDLE, MODEL_BUNDLE, read_manifest
from nemo_build.errors import BundleError, UserError

_FOLDER_OPTION = "session.model_external_initializers_file_folder_path"


_TYPES = ("tensor(float)", "tensor(float16)", "tensor(double)")
"""Types of values that are compared; NumPy has no bfloat16, and what is looked up in it is cast at once."""


@dataclass(frozen=True)
class Traced:
    """What a graph computed.

    Attributes:
        values: By name, in the order in which the nodes stand in the graph.
        ops: For each value: the op that made it, and the values that this read.
    """

    values: Mapping[str, NDArray[Any]]
    ops: Mapping[str, tuple[str, tuple[str, ...]]]


def open_manifest(path: Path) -> dict[str, Any]:
    """The manifest of an engine, or of a model bundle.

    Raises:
        UserError: It is neither.
    """
    for name in (ENGINE_BUNDLE, MODEL_BUNDLE):
        if (path / name).is_file():
            return read_manifest(path, name)
    raise UserError(
        f"{path} is neither an engine nor a model bundle.",
        hint=f"It should hold {ENGINE_BUNDLE} or {MODEL_BUNDLE}.",
    )


def can_trace(manifest: Mapping[str, Any], graph: str) -> bool:
    """Whether a graph is ONNX for the CPU, so that it can be traced anywhere."""
    on_cpu = manifest.get("backend", {"name": "onnxruntime"})["name"] == "onnxruntime"
    return on_cpu and str(manifest["graphs"].get(graph, {}).get("file", "")).endswith(".onnx")


def trace(
    path: Path, tokens: Sequence[int], *, graph: str = "target", only: Collection[str] | None = None
) -> Traced:
    """Run a graph of an engine or a model bundle on one sequence, from empty states.

    Args:
        path: The engine or bundle.
        tokens: Fed in one step; logits are those after each of them.
        graph: Which graph; hidden states that it wants are the same random ones each time.
        only: Names of the values that are wanted; ``None``: all floating-point ones.

    Raises:
        UserError: There is no such graph, or it is not ONNX for the CPU, or wants inputs that a trace has not.
        BundleError: ONNX Runtime cannot load it.
    """
    import onnx

    manifest = open_manifest(path)
    if graph not in manifest["graphs"]:
        raise UserError(f"{path} has no graph {graph!r}; it has {', '.join(manifest['graphs'])}.")
    if not can_trace(manifest, graph):
        raise UserError(
            f"{path}: what {graph} computes on its way can be seen of ONNX graphs for the CPU only."
        )
    entry = manifest["graphs"][graph]
    model = onnx.load(path / entry["file"], load_external_data=False)
    ops = {
        o: (f"{n.domain}.{n.op_type}".lstrip("."), tuple(n.input))
        for n in model.graph.node
        for o in n.output
        if o
    }
    states = {f"{s['name']}.out" for s in entry["state"]}
    wanted = [name for name in ops if name not in states and (only is None or name in only)]
    have = {o.name for o in model.graph.output}
    model.graph.output.extend([onnx.ValueInfoProto(name=name) for name in wanted if name not in have])
    session = _open(model.SerializeToString(), path, manifest)
    types = {o.name: o.type for o in session.get_outputs()}
    floats = [name for name in wanted if types[name] in _TYPES]
    found = session.run(floats, _inputs(session, path, tokens))
    return Traced({n: v for n, v in zip(floats, found, strict=True) if v.ndim > 1}, ops)


def relative_error(want: NDArray[Any], found: NDArray[Any]) -> float:
    """``|found - want| / |want|`` (Frobenius norms, float64); infinite if `found` is not finite where `want` is."""
    a, b = want.astype(np.float64), found.astype(np.float64)
    norm, difference = float(np.linalg.norm(a)), float(np.linalg.norm(b - a))
    if not np.isfinite(difference):
        return 0.0 if np.array_equal(a, b, equal_nan=True) else float("inf")
    return difference / norm if norm else (0.0 if difference == 0 else float("inf"))


def _open(model: bytes, path: Path, manifest: Mapping[str, Any]) -> Any:
    import onnxruntime as ort

    from nemo_build.plugins import native
    from nemo_build.settings import threads

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads()
    library = native.library()
    if library is not None:
        options.register_custom_ops_library(str(library))
    options.add_session_config_entry(_FOLDER_OPTION, str(manifest["weights"].get("folder") or path.resolve()))
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own exception types share no base class
        raise BundleError(f"ONNX Runtime cannot load a graph of {path}: {error}") from error


def _inputs(session: Any, path: Path, tokens: Sequence[int]) -> dict[str, NDArray[Any]]:
    from nemo_build.state import StateSpec

    metadata = session.get_modelmeta().custom_metadata_map
    sizes = {"slots": 1, "context": len(tokens) + 1, "pending": 0}
    states = [StateSpec.from_json(s) for s in json.loads(metadata["nemo_build.state"])]
    spec = json.loads(metadata["nemo_build.spec"])
    hidden = np.random.default_rng(0).standard_normal((1, len(tokens), int(spec["hidden_size"])))
    every: dict[str, NDArray[Any]] = {
        "lengths": np.array([len(tokens)]),
        "past": np.array([0]),
        "accepted": np.array([0]),
        "slots": np.array([0]),
        "input_ids": np.array([list(tokens)]),
        "logit_rows": np.arange(len(tokens)),
        "hidden_in": hidden.astype(np.float32),
        **{s.name: np.zeros(s.resolve(sizes), s.dtype) for s in states},
    }
    names = [i.name for i in session.get_inputs()]
    unknown = [n for n in names if n not in every]
    if unknown:
        raise UserError(f"{path}: a trace has nothing to put into {', '.join(unknown)}.")
    return {n: every[n] for n in names}
