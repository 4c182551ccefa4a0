# SPDX-License-Identifier: Apache-2.0
"""Runs graphs with kernel nodes on a CPU: kernels in Triton's interpreter, all between them in ONNX Runtime."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort

from nemo_build.engines.gpu.kernel_nodes import KERNEL_DOMAIN, KernelTable, suited
from nemo_build.engines.gpu.lowering import kernel_states, lower_kernels
from nemo_build.engines.gpu.weights import KernelWeights
from nemo_build.engines.trt.emitter import BFLOAT16, FLOAT
from nemo_build.engines.trt.phases import DECODE, PREFILL, phases_of
from nemo_build.engines.weights import Weight, stored_tensors
from nemo_build.export.exporter import export_bundle
from nemo_build.export.quantize.recipe import Recipe, load_recipe
from nemo_build.plugins.gpu.interpret import run

from .lowered_pair import StepsOfBatches
from .quantized import run as quantize
from .tensorrt_rtx_runner import _mask_attention
from .tiny import reference_model, save_checkpoint

SMALL = {
    "hybrid_override_pattern": "M*E-",
    "hidden_size": 32,
    "intermediate_size": 48,
    "mamba_num_heads": 2,
    "n_groups": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
}
"""Widths at which the interpreter is quick, and which divide into blocks."""

LIGHTNING = replace(load_recipe("lightning"), kv_cache="none")
"""Experts and head in NVFP4, Mamba projections in FP8 with rounded inputs. Lowered graphs do not round caches."""

SM = 80
"""Whose kernels are interpreted: the oldest, since the interpreter has no products of codes."""

NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I32": np.int32}


def bundle_of(directory: Path, recipe: str | Recipe | None = None, **config) -> Path:
    """The bundle of a random model, quantized by a recipe."""
    save_checkpoint(reference_model(**{**SMALL, **config}), directory / "checkpoint")
    if recipe is not None:
        quantize(directory / "checkpoint", directory / "quantized", recipe)
    source = "checkpoint" if recipe is None else "quantized"
    return export_bundle(directory / source, directory / "bundle").out


class KernelModel(StepsOfBatches):
    """All phases of one graph of a bundle on shared state, in place, as a session would run them.

    Args:
        bundle: The model bundle.
        graph: The graph's name.
        slots: Rows of the state.
        context: Positions of a row.
        compute: Type of activations.
        rounds: Whether projections round their inputs as the checkpoint says.
        names: The phases.
    """

    def __init__(
        self,
        bundle: Path,
        graph: str = "target",
        *,
        slots: int = 3,
        context: int = 128,
        compute: int = FLOAT,
        rounds: bool = True,
        names: tuple[str, ...] = (DECODE, PREFILL),
    ) -> None:
        self.graph = graph
        model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
        self.weights = KernelWeights(stored_tensors([model]), compute=compute, rounds=rounds)
        phases = {p.name: p for p in phases_of(slots, context) if p.name in names}
        self.tables = {name: KernelTable() for name in phases}
        self.lowered = {n: lower_kernels(model, p, self.weights, self.tables[n]) for n, p in phases.items()}
        self.contents = {n: contents(w, bundle) for n, w in self.weights.weights.items()}
        self.graphs = {n: KernelGraph(m, self.tables[n]) for n, m in self.lowered.items()}
        self.states = kernel_states(model, phases[DECODE], compute)
        self.state = {s.name: np.zeros(s.resolve({"slots": slots}), s.dtype) for s in self.states}

    def width(self, name: str) -> int:
        """The last dimension of an input."""
        (found,) = (i for i in self.lowered[DECODE].graph.input if i.name == name)
        return found.type.tensor_type.shape.dim[-1].dim_value

    def run(self, phase: str, inputs: dict[str, Any]) -> dict[str, np.ndarray]:
        """One step of all rows, row i in slot i; returns every output, and advances the state."""
        found = self.graphs[phase].run({**self.state, **self.contents, **inputs})
        self.state.update({s.name: found[s.output] for s in self.states})
        return found


def contents(weight: Weight, folder: Path) -> np.ndarray:
    """What a weight's place in the file holds."""
    data = b"".join(map(bytes, weight.chunks(folder)))
    assert len(data) == weight.nbytes == math.prod(weight.shape) * np.dtype(NUMPY[weight.dtype]).itemsize
    return np.frombuffer(data, NUMPY[weight.dtype]).reshape(weight.shape)


class KernelGraph:
    """A lowered graph, cut into kernel nodes and what lies between them.

    ONNX Runtime computes what has no bfloat16 in it, and ONNX's own reference, node by node, what has.
    """

    def __init__(self, model: onnx.ModelProto, table: KernelTable) -> None:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        _mask_attention(copy)
        self.kernels = {name: suited(use, SM)[0] for name, use in table.uses.items()}
        self.outputs = [o.name for o in copy.graph.output]
        self.constants = {t.name: t for t in copy.graph.initializer}
        self.opsets = [o for o in copy.opset_import if o.domain in ("", "trt")]
        typed = types_of(copy)
        self.pieces: list[list[onnx.NodeProto]] = []
        self.narrow: set[int] = set()
        last = ""
        for node in copy.graph.node:
            narrow = any(typed.get(n, (0,))[0] == BFLOAT16 for n in (*node.input, *node.output))
            kind = "kernel" if node.domain == KERNEL_DOMAIN else "reference" if narrow else "runtime"
            if kind != "runtime" or kind != last:
                self.pieces.append([])
            self.pieces[-1].append(node)
            last = kind
            if kind == "reference":
                self.narrow.add(len(self.pieces) - 1)
        self.sessions: dict[int, ort.InferenceSession] = {}

    def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The graph's outputs; what kernels leave alone is NaN, other than in state."""
        values = {**feeds, **{n: onnx.numpy_helper.to_array(t) for n, t in self.constants.items()}}
        for i, nodes in enumerate(self.pieces):
            if nodes[0].domain == KERNEL_DOMAIN:
                values |= self._launch(nodes[0], values)
            elif i in self.narrow:
                values |= self._refer(nodes[0], values)
            else:
                values |= self._infer(i, values)
        return {name: values[name] for name in self.outputs}

    def _launch(self, node: onnx.NodeProto, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A kernel node, its parameters by their order."""
        kernel = self.kernels[node.op_type]
        given = {t.name: values[n] for t, n in zip(kernel.inputs, node.input, strict=True)}
        made = run(kernel, given)
        return {n: made[t.name] for t, n in zip(kernel.outputs, node.output, strict=True)}

    def _refer(self, node: onnx.NodeProto, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A node with bfloat16; products of matrices are exact before they are rounded."""
        given = {n: values[n] for n in node.input if n}
        if node.op_type == "Gemm":
            a, b = (given[n].astype(np.float32) for n in node.input)
            return {node.output[0]: (a @ b.T).astype(ml_dtypes.bfloat16)}
        found = onnx.reference.ReferenceEvaluator(node).run(None, given)
        return dict(zip(node.output, found, strict=True))

    def _infer(self, piece: int, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """A piece without bfloat16."""
        if piece not in self.sessions:
            self.sessions[piece] = self._session(piece, values)
        session = self.sessions[piece]
        names = [o.name for o in session.get_outputs()]
        found = session.run(names, {i.name: values[i.name] for i in session.get_inputs()})
        return dict(zip(names, found, strict=True))

    def _session(self, piece: int, values: dict[str, np.ndarray]) -> ort.InferenceSession:
        """A session of one piece; types are those of the values that come in."""
        nodes = self.pieces[piece]
        made = {n for node in nodes for n in node.output}
        used = {n for node in nodes for n in node.input if n} - made
        later = {n for other in self.pieces[piece + 1 :] for node in other for n in node.input}
        inputs = [
            onnx.helper.make_tensor_value_info(
                n, onnx.helper.np_dtype_to_tensor_dtype(values[n].dtype), [None] * values[n].ndim
            )
            for n in sorted(used - set(self.constants))
        ]
        outputs = [onnx.ValueInfoProto(name=n) for n in sorted(made & (later | set(self.outputs)))]
        constants = [t for n, t in self.constants.items() if n in used]
        graph = onnx.helper.make_graph(nodes, f"piece_{piece}", inputs, outputs, constants)
        model = onnx.helper.make_model(graph, opset_imports=self.opsets, ir_version=11)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def types_of(model: onnx.ModelProto) -> dict[str, tuple[int, tuple[int | None, ...]]]:
    """ONNX type and shape of every value whose type follows from the graph; unknown dimensions are None."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    graph = inferred.graph
    found = {t.name: (t.data_type, tuple(t.dims)) for t in graph.initializer}
    for info in (*graph.input, *graph.output, *graph.value_info):
        tensor = info.type.tensor_type
        dims = (d.dim_value if d.HasField("dim_value") else None for d in tensor.shape.dim)
        found[info.name] = (tensor.elem_type, tuple(dims))
    return found
