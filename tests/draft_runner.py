# SPDX-License-Identifier: Apache-2.0
"""A drafter's graphs in ONNX Runtime: two sessions over one set of caches, updated in place."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort

from nemo_build.bundle import MODEL_BUNDLE, read_manifest
from nemo_build.engines.ort import OrtGraph, OrtSession
from nemo_build.engines.session import StepBatch
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
        folder = read_manifest(bundle, MODEL_BUNDLE)["weights"]["folder"]
        sizes = {"slots": slots, "context": context, "weights_folder": folder}
        self._context = OrtGraph(bundle / f"{kind}_context.onnx", **sizes)
        self.caches = self._context.state()
        self._block = OrtSession(bundle / f"{kind}.onnx", hidden=True, state=self.caches, **sizes)
        assert self._context.states == self._block.states
        has_markov = (bundle / f"{kind}_markov.onnx").is_file()
        self._markov = open_session(bundle, f"{kind}_markov") if has_markov else None

    def extend(self, taps: dict[int, np.ndarray], past: dict[int, int]) -> None:
        """Add tokens' taps ``[n, m*H]`` to slots' contexts; `past` is read and advanced."""
        slots = list(taps)
        lengths = [len(taps[s]) for s in slots]
        padded = np.full((len(slots), max(1, *lengths), taps[slots[0]].shape[1]), np.nan, np.float32)
        for row, slot in zip(padded, slots, strict=True):
            row[: len(taps[slot])] = taps[slot]
        rows = {"slots": slots, "lengths": lengths, "past": [past.get(s, 0) for s in slots]}
        self._context.run({"taps": padded, **{n: np.array(v, np.int64) for n, v in rows.items()}})
        for slot, n in zip(slots, lengths, strict=True):
            past[slot] = past.get(slot, 0) + n

    def draft(
        self, blocks: dict[int, list[int]], past: dict[int, int]
    ) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Run blocks behind slots' contexts: logits ``[n, V]`` and hidden ``[n, H]`` by slot."""
        slots = list(blocks)
        behind = [past.get(s, 0) for s in slots]
        output = self._block.step(
            StepBatch.of_rows(list(blocks.values()), past=behind, slots=slots, logits="all")
        )
        found, at = {}, 0
        for row, (slot, tokens) in enumerate(blocks.items()):
            found[slot] = output.logits[at : at + len(tokens)], output.hidden[row, : len(tokens)]
            at += len(tokens)
        return found

    def markov(self, previous: np.ndarray, base: np.ndarray, hidden: np.ndarray) -> list[np.ndarray]:
        """Logits after the tokens `previous`, and the confidence where there is a head for it."""
        given = {"previous_ids": previous, "base_logits": base, "hidden": hidden}
        wanted = {i.name for i in self._markov.get_inputs()}
        return self._markov.run(None, {n: v for n, v in given.items() if n in wanted})
