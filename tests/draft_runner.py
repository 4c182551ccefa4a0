# SPDX-License-Identifier: Apache-2.0
"""A drafter's graphs in ONNX Runtime: two sessions over one set of caches, updated in place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.plugins import native
from nemo_build.state import StateSpec


def open_session(bundle: Path, graph: str) -> ort.InferenceSession:
    """Open a graph of a bundle as it is, with the native kernels where they are in use."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if (library := native.library()) is not None:
        options.register_custom_ops_library(str(library))
    folder = read_manifest(bundle, MODEL_BUNDLE)["weights"]["folder"]
    if folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return ort.InferenceSession(str(bundle / f"{graph}.onnx"), options, providers=["CPUExecutionProvider"])


def states_of(session: ort.InferenceSession) -> list[StateSpec]:
    """The state buffers that a graph declares."""
    text = session.get_modelmeta().custom_metadata_map["nemo_build.state"]
    return [StateSpec.from_json(s) for s in json.loads(text)]


class DraftRunner:
    """A drafter of a bundle.

    Args:
        bundle: The bundle's directory.
        kind: ``dflash`` or ``dspark``.
        slots: State slots.
        context: Positions of a slot.
    """

    def __init__(self, bundle: Path, kind: str, *, slots: int = 4, context: int = 64) -> None:
        self._context = open_session(bundle, f"{kind}_context")
        self._block = open_session(bundle, kind)
        has_markov = (bundle / f"{kind}_markov.onnx").is_file()
        self._markov = open_session(bundle, f"{kind}_markov") if has_markov else None
        specs = states_of(self._context)
        assert specs == states_of(self._block)
        sizes = {"slots": slots, "context": context, "pending": 0}
        self.caches = {s.name: np.zeros(s.resolve(sizes), np.float32) for s in specs}
        self._buffers = {s.name: ort.OrtValue.ortvalue_from_numpy(self.caches[s.name]) for s in specs}

    def extend(self, taps: dict[int, np.ndarray], past: dict[int, int]) -> None:
        """Add tokens' taps ``[n, m*H]`` to slots' contexts; `past` is read and advanced."""
        slots = list(taps)
        lengths = [len(taps[s]) for s in slots]
        padded = np.full((len(slots), max(1, *lengths), taps[slots[0]].shape[1]), np.nan, np.float32)
        for row, slot in zip(padded, slots, strict=True):
            row[: len(taps[slot])] = taps[slot]
        self._run(self._context, {"taps": padded}, slots, lengths, past, [])
        for slot, n in zip(slots, lengths, strict=True):
            past[slot] = past.get(slot, 0) + n

    def draft(
        self, blocks: dict[int, list[int]], past: dict[int, int]
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Run blocks behind slots' contexts: logits ``[n, V]`` and hidden ``[n, H]`` by slot."""
        slots = list(blocks)
        lengths = [len(blocks[s]) for s in slots]
        ids = np.zeros((len(slots), max(1, *lengths)), np.int64)
        for row, slot in zip(ids, slots, strict=True):
            row[: len(blocks[slot])] = blocks[slot]
        rows = np.flatnonzero(np.arange(ids.shape[1]) < np.array(lengths)[:, None])
        more = {"input_ids": ids, "logit_rows": rows, "accepted": np.zeros(len(slots), np.int64)}
        logits, hidden = self._run(self._block, more, slots, lengths, past, ["logits", "hidden"])
        found, at = {}, 0
        for row, (slot, n) in enumerate(zip(slots, lengths, strict=True)):
            found[slot] = logits[at : at + n], hidden[row, :n]
            at += n
        return found

    def markov(self, previous: np.ndarray, base: np.ndarray, hidden: np.ndarray) -> list[np.ndarray]:
        """Logits after the tokens `previous`, and the confidence where there is a head for it."""
        given = {"previous_ids": previous, "base_logits": base, "hidden": hidden}
        wanted = {i.name for i in self._markov.get_inputs()}
        return self._markov.run(None, {n: v for n, v in given.items() if n in wanted})

    def _run(
        self,
        session: ort.InferenceSession,
        inputs: dict[str, np.ndarray],
        slots: list[int],
        lengths: list[int],
        past: dict[int, int],
        outputs: list[str],
    ) -> list[np.ndarray]:
        binding = session.io_binding()
        rows = {"slots": slots, "lengths": lengths, "past": [past.get(s, 0) for s in slots]}
        for name, value in {**inputs, **{n: np.array(v, np.int64) for n, v in rows.items()}}.items():
            binding.bind_cpu_input(name, value)
        for name in outputs:
            binding.bind_output(name)
        for name, buffer in self._buffers.items():
            binding.bind_ortvalue_input(name, buffer)
            binding.bind_ortvalue_output(f"{name}.out", buffer)
        session.run_with_iobinding(binding)
        return [value.numpy() for value in binding.get_outputs()[: len(outputs)]]
