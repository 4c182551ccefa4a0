# SPDX-License-Identifier: Apache-2.0
"""Build: a model bundle becomes an engine bundle for one target."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import onnx
import onnxruntime

import nemo_build
from nemo_build.bundle import (
    ENGINE_BUNDLE,
    MODEL_BUNDLE,
    Progress,
    check_files,
    copy_text_files,
    publish,
    read_manifest,
    sha256_file,
    sha256_json,
    write_manifest,
)
from nemo_build.engines import cache
from nemo_build.engines.plan import MemoryPlan, host_memory, plan_memory
from nemo_build.engines.targets import TARGETS
from nemo_build.engines.weights import PackedWeight, lay_out, point_at, write_packed
from nemo_build.errors import BundleError, UserError
from nemo_build.export.safetensors_header import HeaderError, read_header
from nemo_build.state import StateSpec

WEIGHTS_FILE = "weights.bin"


@dataclass(frozen=True)
class BuildOptions:
    """What a build may be asked for.

    Attributes:
        max_sequences: Sequences at a time.
        max_context: Positions per sequence; ``None`` means the model's limit, but at most 8192.
        max_pending: Tokens per sequence that a step may leave uncommitted (draft length + 1); 0 without
            speculation.
        memory: Bytes that the engine may use; ``None`` means all of the target's.
    """

    max_sequences: int = 8
    max_context: int | None = None
    max_pending: int = 0
    memory: int | None = None


@dataclass(frozen=True)
class BuildResult:
    """What a build did: the engine's directory, its plan, its cache key, and whether the cache had it."""

    out: Path
    plan: MemoryPlan
    key: str
    cached: bool


class BuildProgress(Protocol):
    """Who is told of a build's progress."""

    def start(self, what: str, total: int) -> Progress:
        """Begin a phase of `total` bytes; returns what is to be called with each number of bytes done."""
        ...


def build_engine(
    bundle: Path,
    out: Path,
    target: str = "cpu",
    options: BuildOptions | None = None,
    *,
    use_cache: bool = True,
    force: bool = False,
    progress: BuildProgress | None = None,
) -> BuildResult:
    """Build an engine.

    Args:
        bundle: Directory of a model bundle.
        out: Directory of the engine.
        target: A name of :data:`~nemo_build.engines.targets.TARGETS`.
        options: Sizes.
        use_cache: Take the engine from the build cache, or add it there.
        force: Replace `out`.
        progress: Told of the long phases.

    Raises:
        BundleError: The bundle is missing or damaged, or its checkpoint has changed since.
        PlanError: The engine cannot fit the target's memory.
        UserError: Unknown or unavailable target, or `out` exists.
    """
    options = options or BuildOptions()
    _require_target(target)
    manifest = read_manifest(bundle, MODEL_BUNDLE)
    check_files(bundle, manifest["files"] | {g["file"]: g["sha256"] for g in manifest["graphs"].values()})
    folder = Path(manifest["weights"]["folder"] or bundle)
    models = {
        name: onnx.load(bundle / g["file"], load_external_data=False)
        for name, g in manifest["graphs"].items()
    }
    weights = lay_out(models.values())
    _check_shards(manifest, folder, weights)
    settings = _settings(manifest, options)
    plan = _plan(manifest, weights, settings)
    plan.require(options.memory or host_memory(), "the memory allowed" if options.memory else "this machine")

    contents = _content_digests(folder, weights, progress)
    provenance = {
        "nemo_build": nemo_build.__version__,
        "target": target,
        "backend": {"name": "onnxruntime", "version": onnxruntime.__version__},
        "options": settings,
        "inputs": {
            "checkpoint_digest": manifest["checkpoint"]["digest"],
            "shards_sha256": contents,
            "graphs_sha256": {name: g["sha256"] for name, g in manifest["graphs"].items()},
            "files_sha256": manifest["files"],
        },
    }
    key = sha256_json(provenance)

    def fill(directory: Path) -> None:
        _write_engine(directory, bundle, folder, manifest, models, weights, provenance, plan, progress)

    if not use_cache:
        with publish(out, force=force) as directory:
            fill(directory)
        return BuildResult(out, plan, key, cached=False)
    entry = cache.engine_entry(key)
    cached = cache.is_complete(entry)
    with publish(out, force=force) as directory:
        if not cached:
            entry = cache.store(key, fill)
        cache.link_tree(entry, directory)
    return BuildResult(out, plan, key, cached)


def _write_engine(
    directory: Path,
    bundle: Path,
    folder: Path,
    manifest: dict[str, Any],
    models: dict[str, onnx.ModelProto],
    weights: list[PackedWeight],
    provenance: dict[str, Any],
    plan: MemoryPlan,
    progress: BuildProgress | None,
) -> None:
    """Write all files of an engine into an empty directory."""
    report = progress.start("packing weights", sum(w.nbytes for w in weights)) if progress else None
    digest = write_packed(weights, folder, directory / WEIGHTS_FILE, report)
    graphs = {}
    for name, model in models.items():
        point_at(model, weights, WEIGHTS_FILE)
        path = directory / f"{name}.onnx"
        path.write_bytes(model.SerializeToString(deterministic=True))
        entry = manifest["graphs"][name]
        graphs[name] = {**entry, "file": path.name, "sha256": sha256_file(path)}
    files = copy_text_files(bundle, directory)
    content = {
        **provenance,
        "spec": manifest["spec"],
        "graphs": graphs,
        "plan": plan.to_json(),
        "files": files,
        "sizes": {path.name: path.stat().st_size for path in sorted(directory.iterdir())},
        "weights": {
            "file": WEIGHTS_FILE,
            "sha256": digest,
            "computed_as": "float32",
            "tensors": {w.name: w.to_json() for w in weights},
        },
    }
    write_manifest(directory, ENGINE_BUNDLE, content)


def _require_target(name: str) -> None:
    if name not in TARGETS:
        raise UserError(f"There is no target {name!r}.", [f"{t.name}: {t.product}" for t in TARGETS.values()])
    if name != "cpu":
        raise UserError(f"This version builds engines for cpu only, not yet for {name}.")


def _settings(manifest: dict[str, Any], options: BuildOptions) -> dict[str, int]:
    """The options with defaults filled in; sizes that make no sense are refused."""
    limit = int(manifest["spec"]["max_positions"])
    context = min(limit, 8192) if options.max_context is None else options.max_context
    problems = []
    if options.max_sequences < 1:
        problems.append(f"--max-sequences is {options.max_sequences}; it must be at least 1")
    if not 1 <= context <= limit:
        problems.append(f"--max-context is {context}; the model allows 1 to {limit}")
    if options.max_pending < 0:
        problems.append(f"--max-pending is {options.max_pending}; it must not be negative")
    if problems:
        raise UserError("The engine cannot be built as asked:", problems)
    return {
        "max_sequences": options.max_sequences,
        "max_context": context,
        "max_pending": options.max_pending,
    }


def _plan(manifest: dict[str, Any], weights: Iterable[PackedWeight], settings: dict[str, int]) -> MemoryPlan:
    """The memory plan; ONNX Runtime's own kernels compute with float32 copies of all but the embedding table."""
    weights = list(weights)
    in_memory = sum(
        w.nbytes if w.name == "backbone.embeddings.weight" else 4 * math.prod(w.shape) for w in weights
    )
    states = [StateSpec.from_json(s) for g in manifest["graphs"].values() for s in g["state"]]
    return plan_memory(
        states,
        slots=settings["max_sequences"],
        context=settings["max_context"],
        pending=settings["max_pending"],
        weights_file=sum(w.nbytes for w in weights),
        weights_memory=in_memory,
    )


def _check_shards(manifest: dict[str, Any], folder: Path, weights: Iterable[PackedWeight]) -> None:
    """Raise BundleError if a shard is gone or its size or header is not what was exported."""
    sources = sorted({w.source for w in weights})
    known = manifest["checkpoint"]["files"].values()
    expected = {(f["size"], f["header_sha256"]) for f in known}
    problems = []
    for source in sources:
        path = folder / source
        try:
            header = read_header(path, source)
        except (OSError, HeaderError) as error:
            problems.append(f"{path} cannot be read: {error}")
            continue
        if (header.size, header.digest) not in expected:
            problems.append(f"{path} has changed since the export")
    if problems:
        raise BundleError("The checkpoint of this bundle has changed:", problems, "Export it again.")


def _content_digests(
    folder: Path, weights: Iterable[PackedWeight], progress: BuildProgress | None
) -> list[str]:
    """Sha256 of every shard's contents, in order of their names."""
    digests = cache.ContentDigests()
    paths = [(folder / source).resolve() for source in sorted({w.source for w in weights})]
    unread = sum(p.stat().st_size for p in paths if not digests.is_known(p))
    report = progress.start("hashing weights", unread) if progress and unread else None
    return [digests.digest(path, report) for path in paths]
