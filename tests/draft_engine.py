# SPDX-License-Identifier: Apache-2.0
"""Engines of a tiny target with a drafter, and their speculators."""

from __future__ import annotations

from pathlib import Path

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.export.exporter import export_bundle
from nemo_build.runtime.speculation.base import Speculator
from nemo_build.runtime.speculation.kind import EngineFiles
from nemo_build.runtime.speculation.kinds import SPECULATORS

from .draft_reference import CONFIGS, DraftReference, save_draft
from .tiny import reference_model, save_checkpoint


def open_drafter(
    name: str, directory: Path, *, slots: int, context: int
) -> tuple[DraftReference, Speculator]:
    """A drafter with random weights: its reference, and the speculator of an engine with it; float32 throughout.

    Args:
        name: Of its configuration.
        directory: Where the checkpoints, the bundle and the engine are written.
        slots: State slots.
        context: Positions of a slot.
    """
    model = reference_model(hybrid_override_pattern="MEM*E*")
    save_checkpoint(model, directory / "checkpoint")
    tables = model.model.embeddings.weight.detach(), model.lm_head.weight.detach()
    reference = DraftReference(CONFIGS[name], *tables)
    save_draft(reference, directory / "draft")
    bundle = export_bundle(directory / "checkpoint", directory / "bundle", drafts=[directory / "draft"]).out
    engine = build_engine(bundle, directory / "engine", options=BuildOptions(slots, context)).out
    kind = "dflash" if "DFlash" in CONFIGS[name]["architectures"][0] else "dspark"
    return reference, open_speculator(engine, kind, slots=slots, context=context)


def open_speculator(engine: Path, kind: str, *, slots: int, context: int) -> Speculator:
    """A speculator of an engine."""
    sizes = {"slots": slots, "context": context, "threads": 1}
    return SPECULATORS[kind].open(EngineFiles(engine, read_manifest(engine, ENGINE_BUNDLE), sizes))
