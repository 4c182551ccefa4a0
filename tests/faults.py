# SPDX-License-Identifier: Apache-2.0
"""Faults that are put into a good engine, and what must find each.

Faults of an engine are made in its files, and the manifest's digests are signed anew, so that only what looks at what
the engine does or holds can see them. Faults of the runtime are patched in while a check runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, sha256_file
from nemo_build.engines.check import timing
from nemo_build.engines.check.checks import speed
from nemo_build.engines.ort import OrtSession
from nemo_build.plugins.panels import CHUNK, FORMATS, pack
from nemo_build.runtime.engine import Engine
from nemo_build.runtime.prefix_cache import PrefixCache

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: What it is.
        check: The check that must find it.
        cause: Part of one of the first causes that it must name.
        make: Puts it into a copy of the engine, or into the runtime.
        weights: How the engine holds weights: ``packed`` or ``int4``.
        status: The check's outcome.
    """

    name: str
    check: str
    cause: str
    make: Callable[[Path, Patch], None]
    weights: str = "packed"
    status: str = "regress"


def copy_engine(source: Path, to: Path) -> Path:
    """A copy that may be changed."""
    shutil.copytree(source, to)
    for path in to.rglob("*"):
        path.chmod(0o644 if path.is_file() else 0o755)
    return to


def sign(engine: Path, **changes: Any) -> None:
    """Make the manifest say what the files are; `changes` are made in it too."""
    path = engine / ENGINE_BUNDLE
    manifest = json.loads(path.read_text())
    manifest |= changes
    for graph in manifest["graphs"].values():
        graph["sha256"] = sha256_file(engine / graph["file"])
    for section in (manifest["files"], manifest["weights"]["files"]):
        section.update({name: sha256_file(engine / name) for name in section})
    manifest["sizes"] = {name: (engine / name).stat().st_size for name in manifest["sizes"]}
    path.write_text(json.dumps(manifest, indent=1) + "\n")


def manifest_of(engine: Path) -> dict[str, Any]:
    return json.loads((engine / ENGINE_BUNDLE).read_text())


def edit_tensor(
    engine: Path, name: str, change: Callable[[np.ndarray], None], *, signed: bool = True
) -> None:
    """Change the bytes of a tensor in place."""
    entry = manifest_of(engine)["weights"]["tensors"][name]
    data = np.memmap(engine / "weights.bin", np.uint8, "r+", entry["offset"], (entry["nbytes"],))
    before = data.copy()
    change(data)
    assert not np.array_equal(before, data), f"{name} did not change"
    data.flush()
    if signed:
        sign(engine)


def edit_graph(engine: Path, graph: str, change: Callable[[onnx.GraphProto], None]) -> None:
    path = engine / f"{graph}.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model.graph)
    path.write_bytes(model.SerializeToString(deterministic=True))
    sign(engine)


def edit_text(engine: Path, name: str, change: Callable[[str], str]) -> None:
    path = engine / name
    before = path.read_text()
    after = change(before)
    assert after != before
    path.write_text(after)
    sign(engine)


def nodes(graph: onnx.GraphProto, op: str) -> list[onnx.NodeProto]:
    found = [n for n in graph.node if n.op_type == op]
    assert found, op
    return found


def set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    kept = [a for a in node.attribute if a.name != name]
    assert len(kept) < len(node.attribute), f"{node.name} has no {name}"
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


# --- weights ----------------------------------------------------------------------------------------------------


def one_expert_doubled(engine: Path, patch: Patch) -> None:
    def change(data: np.ndarray) -> None:
        experts = data.view(np.uint16).reshape(16, -1)  # bfloat16
        often = experts[11]  # others get no token of the texts, so that only their digest tells
        often[(often & 0x7F80) != 0] += 0x80

    edit_tensor(engine, "backbone.layers.1.mixer.experts.down_proj.weight.panels", change)


def nibbles_swapped(engine: Path, patch: Patch) -> None:
    def change(data: np.ndarray) -> None:
        codes = data.reshape(-1, 9, CHUNK)[:, :8]
        codes[:] = codes >> 4 | codes << 4

    edit_tensor(engine, "backbone.layers.5.mixer.in_proj.weight.panels", change)


def router_bias_dropped(engine: Path, patch: Patch) -> None:
    for name in manifest_of(engine)["weights"]["tensors"]:
        if name.endswith("e_score_correction_bias"):
            edit_tensor(engine, name, lambda data: data.fill(0))


def head_tied(engine: Path, patch: Patch) -> None:
    tensors = manifest_of(engine)["weights"]["tensors"]
    entry = tensors["backbone.embeddings.weight"]
    rows, columns = entry["shape"]
    with (engine / "weights.bin").open("rb") as file:
        file.seek(entry["offset"])
        codes = np.frombuffer(file.read(entry["nbytes"]), np.uint8).reshape(rows, 2 * columns)
    packed = pack(FORMATS["bf16"], columns, np.ascontiguousarray(codes), None)
    edit_tensor(engine, "lm_head.weight.panels", lambda data: np.copyto(data, packed))


def drafter_weights_lost(engine: Path, patch: Patch) -> None:
    edit_tensor(engine, "dflash.fc.weight.panels", lambda data: data.fill(0))


def a_bit_flipped(engine: Path, patch: Patch) -> None:
    def change(data: np.ndarray) -> None:
        data[0] ^= 1

    edit_tensor(engine, "mtp.layers.0.eh_proj.weight.panels", change, signed=False)


def not_a_number(engine: Path, patch: Patch) -> None:
    def change(data: np.ndarray) -> None:
        data.view(np.uint16)[:] = 0x7FC0

    edit_tensor(engine, "backbone.layers.2.norm.weight", change)


def larger_file(engine: Path, patch: Patch) -> None:
    path = engine / "weights.bin"
    with path.open("ab") as file:
        file.write(bytes(path.stat().st_size // 10))
    sign(engine)


# --- graphs -----------------------------------------------------------------------------------------------------


def kv_off_by_one(engine: Path, patch: Patch) -> None:
    def change(graph: onnx.GraphProto) -> None:
        one = onnx.numpy_helper.from_array(np.array([1], np.int64), "one")
        graph.initializer.append(one)
        attention = nodes(graph, "CachedAttention")[0]
        place = list(graph.node).index(attention)
        add = onnx.helper.make_node("Add", ["past", "one"], ["past_and_one"], "backbone.layers.3/past")
        inputs = ["past_and_one" if i == "past" else i for i in attention.input]
        del attention.input[:]
        attention.input.extend(inputs)
        graph.node.insert(place, add)

    edit_graph(engine, "target", change)


def dt_clamped(engine: Path, patch: Patch) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for node in nodes(graph, "SelectiveScan"):
            set_attribute(node, "dt_max", 0.01)

    edit_graph(engine, "target", change)


def rope(engine: Path, patch: Patch) -> None:
    """Queries and keys of the first attention layer are rotated, which this model's are not."""

    def change(graph: onnx.GraphProto) -> None:
        steps = np.arange(2048)[:, None] / 10000 ** (np.arange(16) / 16)[None]
        for name, table in (("cos", np.cos(steps)), ("sin", np.sin(steps))):
            graph.initializer.append(onnx.numpy_helper.from_array(table.astype(np.float32), f"rope_{name}"))
        for name, value in (("zero", 0), ("step", 1)):
            graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, np.int64), f"rope_{name}"))
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([1], np.int64), "rope_axis"))
        make = onnx.helper.make_node
        made = [
            make("Shape", ["input_ids"], ["rope_shape"], start=1),
            make("Squeeze", ["rope_shape"], ["rope_length"]),
            make("Range", ["rope_zero", "rope_length", "rope_step"], ["rope_range"]),
            make("Unsqueeze", ["past", "rope_axis"], ["rope_past"]),
            make("Add", ["rope_past", "rope_range"], ["rope_positions"]),
        ]
        attention = nodes(graph, "CachedAttention")[0]
        place = list(graph.node).index(attention)
        for i, heads in ((0, 6), (1, 2)):
            inputs = [attention.input[i], "rope_cos", "rope_sin", "rope_positions"]
            made.append(make("RotaryEmbedding", inputs, [f"rope_{i}"], num_heads=heads))
            attention.input[i] = f"rope_{i}"
        for i, node in enumerate(made):
            node.name = f"backbone.layers.3/rope_{i}"
            graph.node.insert(place + i, node)

    edit_graph(engine, "target", change)


def routed_scale_lost(engine: Path, patch: Patch) -> None:
    def change(graph: onnx.GraphProto) -> None:
        name = next(n for n in graph.node if n.name.endswith("router/weights")).input[1]
        scale = next(i for i in graph.initializer if i.name == name)
        value = onnx.numpy_helper.to_array(scale)
        assert (value != 1).all()
        scale.CopyFrom(onnx.numpy_helper.from_array(np.ones_like(value), name))

    edit_graph(engine, "target", change)


def epsilon_wrong(engine: Path, patch: Patch) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for node in nodes(graph, "RMSNormalization"):
            set_attribute(node, "epsilon", 0.5)

    edit_graph(engine, "target", change)


def taps_in_wrong_order(engine: Path, patch: Patch) -> None:
    def change(graph: onnx.GraphProto) -> None:
        tapped = next(n for n in graph.node if n.output[0] == "taps")
        names = list(tapped.input)
        del tapped.input[:]
        tapped.input.extend(names[1:] + names[:1])

    edit_graph(engine, "target", change)


def taps_shifted(engine: Path, patch: Patch) -> None:
    def change(graph: onnx.GraphProto) -> None:
        tapped = next(n for n in graph.node if n.output[0] == "taps")
        layers = [int(i.split("/")[0].rsplit(".", 1)[1]) for i in tapped.input]
        del tapped.input[:]
        tapped.input.extend(f"backbone.layers.{i - 1}/residual" for i in layers)

    edit_graph(engine, "target", change)


def needless_buffer(engine: Path, patch: Patch) -> None:
    """Each step fills 128 MiB of which it takes a zero."""

    def change(graph: onnx.GraphProto) -> None:
        make, array = onnx.helper.make_node, onnx.numpy_helper.from_array
        zero = array(np.zeros(1, np.int64))
        graph.initializer.extend(
            [
                array(np.array([16 << 20], np.int64), "needless_size"),
                array(np.array([0], np.int64), "needless_axis"),
            ]
        )
        made = [
            make("Shape", ["past"], ["needless_one"]),  # so that it is not folded into a constant
            make("Mul", ["needless_one", "needless_size"], ["needless_shape"]),
            make("ConstantOfShape", ["needless_shape"], ["needless"], value=zero),
            make("ReduceMax", ["needless", "needless_axis"], ["needless_zero"]),
            make("Add", ["past", "needless_zero"], ["needless_past"]),
        ]
        attention = nodes(graph, "CachedAttention")[0]
        attention.input[list(attention.input).index("past")] = "needless_past"
        place = list(graph.node).index(attention)
        for i, node in enumerate(made):
            node.name = f"backbone.layers.3/needless_{i}"
            graph.node.insert(place + i, node)

    edit_graph(engine, "target", change)


def layer_precision(engine: Path, patch: Patch) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for node in nodes(graph, "BlockLinear"):
            if node.name.startswith("backbone.layers.2/"):
                set_attribute(node, "precision", "float32")

    edit_graph(engine, "target", change)


def float32_fallback(engine: Path, patch: Patch) -> None:
    def change(graph: onnx.GraphProto) -> None:
        for op in ("BlockLinear", "RoutedExperts"):
            for node in nodes(graph, op):
                set_attribute(node, "precision", "float32")

    edit_graph(engine, "target", change)


# --- texts ------------------------------------------------------------------------------------------------------


def tokenizer_changed(engine: Path, patch: Patch) -> None:
    def change(text: str) -> str:
        data = json.loads(text)
        vocabulary = data["model"]["vocab"]
        a, b = sorted(vocabulary, key=lambda t: -vocabulary[t])[:2]
        vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
        return json.dumps(data)

    edit_text(engine, "tokenizer.json", change)


def template_changed(engine: Path, patch: Patch) -> None:
    edit_text(engine, "chat_template.jinja", lambda text: text.replace("assistant", "Assistant", 1))


def stop_token_missing(engine: Path, patch: Patch) -> None:
    manifest = manifest_of(engine)
    spec = manifest["spec"]
    ids = spec["generation"]["eos_token_ids"]
    assert len(ids) > 1
    spec["generation"]["eos_token_ids"] = ids[:1]
    data = json.loads((engine / "generation_config.json").read_text())
    (engine / "generation_config.json").write_text(json.dumps({**data, "eos_token_id": ids[0]}))
    sign(engine, spec=spec)


# --- the runtime ------------------------------------------------------------------------------------------------


def not_rolled_back(engine: Path, patch: Patch) -> None:
    """All that was pending is committed, rejected drafts too."""
    step = OrtSession.step
    pending: dict[tuple[int, int], int] = {}

    def wrong(self: OrtSession, batch: Any) -> Any:
        accepted = batch.accepted.copy()
        for i, slot in enumerate(batch.slots.tolist()):
            if accepted[i] > 0:
                accepted[i] = max(accepted[i], min(pending.get((id(self), slot), 0), batch.past[i]))
            pending[id(self), slot] = int(batch.lengths[i]) if 1 < batch.lengths[i] <= self.pending else 0
        return step(self, batch.replace(accepted=accepted))

    patch.setattr(OrtSession, "step", wrong)


def rows_mixed(engine: Path, patch: Patch) -> None:
    """Logits depend a little on what else is in a step."""
    step = OrtSession.step

    def wrong(self: OrtSession, batch: Any) -> Any:
        found = step(self, batch)
        if len(batch.slots) > 1 and len(found.logits) > 1:
            found.logits[:] += 0.2 * np.roll(found.logits, 1, axis=0)
        return found

    patch.setattr(OrtSession, "step", wrong)


def chunks_forget(engine: Path, patch: Patch) -> None:
    """What a convolution remembers is lost where a prompt is computed in chunks."""
    step = OrtSession.step

    def wrong(self: OrtSession, batch: Any) -> Any:
        for slot, past, length in zip(batch.slots, batch.past, batch.lengths, strict=True):
            if past > 0 and length > 1:
                for name, state in self.state().items():
                    if name.startswith("conv"):
                        state[slot] = 0
        return step(self, batch)

    patch.setattr(OrtSession, "step", wrong)


def wrong_restored(engine: Path, patch: Patch) -> None:
    """The prefix cache restores everything but the recurrent states."""
    restore = PrefixCache.restore

    def wrong(self: PrefixCache, match: Any, state: Any, slot: int) -> Any:
        kept = {name: buffer[slot].copy() for name, buffer in state.items() if name.startswith("ssm")}
        found = restore(self, match, state, slot)
        for name, buffer in kept.items():
            state[name][slot] = buffer if match.length == 0 else 0 * buffer
        return found

    patch.setattr(PrefixCache, "restore", wrong)


class Clock:
    """A clock for the check of speed that goes by steps: a millisecond each, with noise, and some much longer.

    Args:
        slow: An engine whose steps all take a tenth longer.
    """

    def __init__(self, slow: Path | None = None) -> None:
        self.slow = slow
        self._now, self._rng = 0.0, np.random.default_rng(0)

    def perf_counter(self) -> float:
        self._now += 1e-6
        return self._now

    monotonic = perf_counter

    def step(self, engine: Engine) -> None:
        noise = self._rng.lognormal(0, 0.02) * (3 if self._rng.random() < 0.1 else 1)
        self._now += 1e-3 * noise * (1.1 if engine.directory == self.slow else 1)

    def install(self, patch: Patch) -> None:
        step = Engine.step

        def timed(engine: Engine, *arguments: Any, **options: Any) -> None:
            step(engine, *arguments, **options)
            self.step(engine)

        patch.setattr(Engine, "step", timed)
        for module in (speed, timing):
            patch.setattr(module, "time", self)


def slower(engine: Path, patch: Patch) -> None:
    """Every step of this engine takes a tenth longer."""
    Clock(engine).install(patch)


def licence_changed(engine: Path, patch: Patch) -> None:
    from nemo_build.engines.check.checks import provenance

    found = provenance.licences()
    patch.setattr(provenance, "licences", lambda: found | {"numpy": "LicenseRef-Proprietary"})


FAULTS = (
    Fault("one expert's weights doubled", "numerics", "backbone.layers.1.mixer.experts", one_expert_doubled),
    Fault(
        "nibbles of a tensor swapped", "numerics", "backbone.layers.5.mixer.in_proj", nibbles_swapped, "int4"
    ),
    Fault("router bias dropped", "numerics", "e_score_correction_bias", router_bias_dropped),
    Fault("head tied to the embeddings", "numerics", "lm_head", head_tied),
    Fault("keys and values off by one", "numerics", "backbone.layers.3", kv_off_by_one),
    Fault("dt clamped", "numerics", "dt_max was inf, is 0.0", dt_clamped),
    Fault("rotated queries and keys", "numerics", "backbone.layers.3", rope),
    Fault("routed scale lost", "numerics", "backbone.layers.1", routed_scale_lost),
    Fault("norms' epsilon wrong", "numerics", "RMSNormalization.epsilon", epsilon_wrong),
    Fault("not a number", "numerics", "backbone.layers.2.norm.weight", not_a_number),
    Fault("head tied to the embeddings, perplexity", "quality", "lm_head", head_tied),
    Fault("taps shifted by a layer", "acceptance", "dflash, dspark: the taps that all", taps_shifted),
    Fault("taps in the wrong order", "acceptance", "target/tapped", taps_in_wrong_order),
    Fault("drafter's weights lost", "acceptance", "dflash.fc.weight", drafter_weights_lost),
    Fault("state not rolled back", "behaviour", "not undone", not_rolled_back),
    Fault("result depends on the batch", "behaviour", "what else is in a step", rows_mixed),
    Fault("chunks forget", "behaviour", "state after a chunk", chunks_forget),
    Fault("wrong state restored", "behaviour", "restored state", wrong_restored),
    Fault("stop token missing", "behaviour", "end tokens", stop_token_missing),
    Fault("precision of one layer changed", "structure", "precision was", layer_precision),
    Fault("silent fallback to float32", "structure", "is float32", float32_fallback),
    Fault("tokenizer changed", "provenance", "tokenizer", tokenizer_changed),
    Fault("chat template changed", "provenance", "chat template", template_changed),
    Fault("licence changed", "provenance", "numpy", licence_changed),
    Fault("a bit flipped on disk", "provenance", "mtp.layers.0.eh_proj", a_bit_flipped, status="broken"),
    Fault("a tenth larger", "size", "file weights.bin grew", larger_file),
    Fault("a needless buffer in the graph", "memory", "target/backbone.layers.3", needless_buffer),
    Fault("a tenth slower", "speed", "nothing that is recorded", slower),
)
"""All faults. Structure and provenance may see those of an engine too."""
