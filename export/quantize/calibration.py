# SPDX-License-Identifier: Apache-2.0
"""Calibration: the largest activations at the inputs of projections, and which experts a text reaches.

The model runs layer by layer in ONNX Runtime: one layer's graph is built from the same blocks that export uses,
run over all of the text, and dropped before the next. So memory is one layer and the text's hidden states.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from nemo_build.errors import CheckpointError, UserError
from nemo_build.export.blocks import StepInputs, blocks
from nemo_build.export.checkpoint import Checkpoint, TensorInfo
from nemo_build.export.graph import ACTIVATION, GraphBuilder
from nemo_build.export.quantize.recipe import Assignment
from nemo_build.export.quantize.streaming import DTYPES
from nemo_build.spec import BlockKind, ModelSpec

DEFAULT_TEXT = Path(__file__).parent / "calibration.jsonl"

Array = NDArray[np.float32]


@dataclass
class Calibration:
    """What was measured.

    Attributes:
        source: Name of the text.
        digest: Sha256 over the token ids.
        sequences: Sequences run.
        tokens: Tokens run.
        amax: Largest absolute input of each projection that needed it, and under ``NAME.output`` the largest
            absolute output of key and value projections.
        tokens_per_expert: For each layer with experts, how many tokens chose each expert.
        unmeasured: Projections whose input was always zero, so that their scale is that of the weight.
    """

    source: str
    digest: str
    sequences: int
    tokens: int
    amax: dict[str, float] = field(default_factory=dict)
    tokens_per_expert: dict[str, list[int]] = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def unreached(self, minimum: int = 1) -> dict[str, list[int]]:
        """Experts that fewer than `minimum` tokens chose, by layer."""
        found = {
            layer: [e for e, n in enumerate(counts) if n < minimum]
            for layer, counts in self.tokens_per_expert.items()
        }
        return {layer: experts for layer, experts in found.items() if experts}


def read_texts(path: Path) -> list[str]:
    """Texts of a calibration file: JSON lines with ``text``, or plain text, one sequence a paragraph.

    Raises:
        UserError: The file is missing, or not such a file.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The calibration text {path} cannot be read: {error}") from error
    texts, problems = [], []
    if path.suffix != ".jsonl":
        texts = [p for p in content.split("\n\n") if p.strip()]
        content = ""
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (ValueError, KeyError, TypeError):
            text = None
        if isinstance(text, str):
            texts.append(text)
        else:
            problems.append(f"line {number} is not an object with a text")
    if problems or not texts:
        raise UserError(f"The calibration text {path} cannot be used:", problems or ["it is empty"])
    return texts


def record(sequences: Sequence[Sequence[int]], source: str) -> Calibration:
    """A calibration with nothing measured yet: what it is run on."""
    digest = hashlib.sha256(json.dumps([list(map(int, s)) for s in sequences]).encode()).hexdigest()
    return Calibration(source, digest, len(sequences), sum(map(len, sequences)))


def calibrate(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    sequences: Sequence[Sequence[int]],
    assignments: Mapping[str, Assignment],
    *,
    source: str,
    kv_cache: bool,
    progress: Callable[[int], None] | None = None,
) -> Calibration:
    """Run the model over token sequences.

    Args:
        checkpoint: The unquantized checkpoint.
        spec: Its model.
        sequences: Token ids, each at most as long as the model's context.
        assignments: Projections; those with rounded activations are measured.
        source: Name of the text, for the record.
        kv_cache: Whether keys and values are measured.
        progress: Called with 1 after each layer.

    Raises:
        UserError: There is no text, or the shards lie in several directories.
        CheckpointError: The model computes values that are not finite.
    """
    if not sequences:
        raise UserError(f"The calibration text {source} has no sequence of at least two tokens.")
    lengths = [len(s) for s in sequences]
    result = record(sequences, source)
    wanted = {name for name, a in assignments.items() if a.activations}
    with tempfile.TemporaryDirectory(prefix="nemo-build-") as folder:
        shape = (sum(lengths), spec.hidden_size)
        hidden: Array = np.memmap(Path(folder) / "hidden", np.float32, "w+", shape=shape)
        _embed(checkpoint, np.concatenate([np.asarray(s, np.int64) for s in sequences]), hidden)
        for index, kind in enumerate(spec.layers):
            layer = _Layer(checkpoint, spec, kind, f"backbone.layers.{index}", wanted, kv_cache)
            layer.run(hidden, lengths, result)
            if progress:
                progress(1)
        if "lm_head" in wanted:
            _head_input(checkpoint, spec, hidden, result)
    return result


def _embed(checkpoint: Checkpoint, tokens: NDArray[np.int64], out: Array) -> None:
    table = _read(checkpoint, checkpoint.tensors["backbone.embeddings.weight"])
    out[:] = table[tokens]


def _read(checkpoint: Checkpoint, info: TensorInfo) -> NDArray[Any]:
    """A checkpoint tensor, mapped."""
    path = checkpoint.files[info.file].path_real
    return np.memmap(path, DTYPES[info.dtype], "r", info.offset, info.shape)


def _head_input(checkpoint: Checkpoint, spec: ModelSpec, hidden: Array, result: Calibration) -> None:
    weight = _read(checkpoint, checkpoint.tensors["backbone.norm_f.weight"]).astype(np.float32)
    for start in range(0, len(hidden), 4096):
        x = np.asarray(hidden[start : start + 4096])
        normed = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + spec.norm_eps) * weight
        _note(result, "lm_head", normed)


def _note(result: Calibration, name: str, values: NDArray[Any]) -> None:
    if values.size:
        largest = float(np.abs(values).max())
        if not np.isfinite(largest):
            raise CheckpointError(f"The model computes values that are not finite at {name}.")
        result.amax[name] = max(result.amax.get(name, 0.0), largest)


class _Probe(GraphBuilder):
    """A graph builder that gives back the inputs and outputs of projections it is asked about."""

    def __init__(self, *args: Any, inputs: set[str], outputs: set[str], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.probed: dict[str, ir.Value] = {}
        self._want_in, self._want_out = inputs, outputs

    def linear(self, x: ir.Value, weight: str, lengths: ir.Value | None, *, bias: bool = False) -> ir.Value:
        y = super().linear(x, weight, lengths, bias=bias)
        if weight in self._want_in:
            self.probed[weight] = x
        if weight in self._want_out:
            self.probed[f"{weight}.output"] = y
        return y

    def experts(
        self,
        x: ir.Value,
        indices: ir.Value,
        weights: ir.Value,
        lengths: ir.Value,
        prefix: str,
        count: int,
    ) -> ir.Value:
        self.probed[f"{prefix}.input"], self.probed[f"{prefix}.indices"] = x, indices
        return super().experts(x, indices, weights, lengths, prefix, count)


class _Layer:
    """One layer: its session, and what is measured of it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        kind: BlockKind,
        prefix: str,
        wanted: set[str],
        kv_cache: bool,
    ) -> None:
        import onnxruntime as ort

        self._checkpoint, self._spec, self._kind, self._prefix = checkpoint, spec, kind, prefix
        mine = {w for w in wanted if w.startswith(f"{prefix}.")}
        self._expert_inputs = {w for w in mine if ".experts." in w}
        outputs = (
            {f"{prefix}.mixer.{n}_proj" for n in "kv"} if kv_cache and kind is BlockKind.ATTENTION else set()
        )
        model, folder, self._probed = self._graph(mine - self._expert_inputs, outputs)
        options = ort.SessionOptions()
        options.log_severity_level = 3
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        data = ir.serde.serialize_model(model).SerializeToString()
        self._session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

    def _graph(self, inputs: set[str], outputs: set[str]) -> tuple[ir.Model, str, dict[str, str]]:
        """The layer as a graph of its own: hidden states in and out, and the probed values."""
        real = {name: shard.path_real for name, shard in self._checkpoint.files.items()}
        g = _Probe(
            "layer",
            self._checkpoint.tensors,
            lambda info: real[info.file].name,
            inputs=inputs,
            outputs=outputs,
        )
        rows = {n: g.input(n, ("batch",)) for n in ("lengths", "past", "accepted", "slots")}
        x = g.input("x", ("batch", "steps", self._spec.hidden_size), ACTIVATION)
        unused = g.constant([0])
        step = StepInputs(input_ids=unused, logit_rows=unused, **rows)
        normed = g.rms_norm(x, g.weight(f"{self._prefix}.norm.weight", ACTIVATION), self._spec.norm_eps)
        mixed = blocks()[self._kind].build(g, self._spec, self._prefix, normed, step)
        g.output(g.op("Add", x, mixed, name="residual"), "y", ("batch", "steps", self._spec.hidden_size))
        names = {}
        for i, (name, value) in enumerate(g.probed.items()):
            kind = ir.DataType.INT64 if name.endswith(".indices") else ACTIVATION
            names[name] = f"probe_{i}"
            g.output(
                g.op("Identity", value, name=f"probe_of({name})"),
                names[name],
                ("batch", "steps", f"width_{i}"),
                kind,
            )
        return g.finish({}), str(self._checkpoint.folder()), names

    def run(self, hidden: Array, lengths: Sequence[int], result: Calibration) -> None:
        """Advance the hidden states of all sequences by this layer, and note what is to be measured."""
        counts = np.zeros(self._spec.moe.num_experts if self._spec.moe else 0, np.int64)
        routed: list[tuple[NDArray[Any], NDArray[Any]]] = []
        for start, n in _spans(lengths):
            x = np.asarray(hidden[start : start + n])[None]
            names = ["y", *self._probed.values()]
            out = dict(zip(names, self._session.run(names, self._feeds(x)), strict=True))
            hidden[start : start + n] = out["y"][0]
            if not np.isfinite(out["y"]).all():
                raise CheckpointError(f"The model computes values that are not finite in {self._prefix}.")
            found = {name: out[label] for name, label in self._probed.items()}
            for name, values in found.items():
                if name.endswith(".indices"):
                    counts += np.bincount(values.reshape(-1), minlength=len(counts))
                elif not name.endswith(".input"):
                    _note(result, name, values)
            if self._expert_inputs:
                prefix = f"{self._prefix}.mixer.experts"
                routed.append((found[f"{prefix}.input"][0], found[f"{prefix}.indices"][0]))
        if routed:
            x, indices = (np.concatenate(parts) for parts in zip(*routed, strict=True))
            self._note_experts(x, indices, result)
        if self._kind is BlockKind.MOE:
            result.tokens_per_expert[self._prefix] = counts.tolist()

    def _feeds(self, x: Array) -> dict[str, NDArray[Any]]:
        """One sequence from its beginning, with fresh state."""
        steps = x.shape[1]
        one, zero = np.array([steps]), np.zeros(1, np.int64)
        feeds: dict[str, NDArray[Any]] = {
            "x": x,
            "lengths": one,
            "past": zero,
            "accepted": zero,
            "slots": zero,
        }
        for state in blocks()[self._kind].states(self._spec, self._prefix):
            shape = state.resolve({"slots": 1, "pending": 0, "context": steps})
            feeds[state.name] = np.zeros(shape, np.float32)
        return {k: v for k, v in feeds.items() if k in {i.name for i in self._session.get_inputs()}}

    def _note_experts(self, x: NDArray[Any], indices: NDArray[Any], result: Calibration) -> None:
        """Inputs of the experts' projections; all experts of a layer share one scale a projection."""
        prefix = f"{self._prefix}.mixer.experts"
        _note(result, f"{prefix}.up_proj", x)
        for e in np.unique(indices):
            rows = x[(indices == e).any(axis=-1)]
            weight = _read(self._checkpoint, self._checkpoint.tensors[f"{prefix}.{e}.up_proj.weight"])
            _note(result, f"{prefix}.down_proj", np.square(np.maximum(rows @ weight.astype(np.float32).T, 0)))


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for n in lengths:
        yield start, n
        start += n
