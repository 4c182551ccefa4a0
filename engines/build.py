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
    FORMAT_VERSION,
    MODEL_BUNDLE,
    Progress,
    check_files,
    copy_files,
    publish,
    read_manifest,
    require_output,
    sha256_file,
    sha256_json,
    write_manifest,
)
from nemo_build.engines.cache import ContentDigests, EngineCache
from nemo_build.engines.plan import MemoryPlan, host_memory, plan_memory
from nemo_build.engines.targets import TARGETS
from nemo_build.engines.weights import PackedWeight, lay_out, point_at, write_packed
from nemo_build.errors import BundleError, UserError
from nemo_build.export.safetensors_header import HeaderError, read_header
from nemo_build.spec import ModelSpec
from nemo_build.state import StateSpec

WEIGHTS_FILE = "weights.bin"


@dataclass(frozen=True)
class BuildOptions:
    """What a build may be asked for.

    Attributes:
        max_sequences: Sequences at a time.
        max_context: Positions per sequence; ``None`` means the model's limit, but at most 8192.
        memory: Bytes that the engine may use; ``None`` means all of the target's.
    """

    max_sequences: int = 8
    max_context: int | None = None
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
        force: Replace `out` if it is a bundle.
        progress: Told of the long phases.

    Raises:
        BundleError: The bundle is missing or damaged, or its checkpoint has changed since.
        PlanError: The engine cannot fit the target's memory.
        UserError: Unknown or unavailable target, or `out` exists.
    """
    options = options or BuildOptions()
    _require_target(target)
    require_output(out, force=force, source=bundle)
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
    if options.memory is None:
        plan.require(host_memory(), "this machine")
    else:
        plan.require(options.memory, "the memory allowed")

    contents = _content_digests(folder, weights, progress)
    provenance = {
        "nemo_build": nemo_build.__version__,
        "engine_format": FORMAT_VERSION,
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
        with publish(out) as directory:
            fill(directory)
        return BuildResult(out, plan, key, cached=False)
    cache = EngineCache(key)
    with cache.lock(), publish(out) as directory:
        cached = cache.is_complete()
        if not cached:
            cache.store(fill)
        cache.copy_to(directory)
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
    files = copy_files(bundle, directory, manifest["files"])
    content = {
        **provenance,
        "spec": manifest["spec"],
        "graphs": graphs,
        "plan": plan.to_json(),
        "files": files,
        "sizes": {
            str(path.relative_to(directory)): path.stat().st_size
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        },
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
    if problems:
        raise UserError("The engine cannot be built as asked:", problems)
    return {
        "max_sequences": options.max_sequences,
        "max_context": context,
    }


def _plan(manifest: dict[str, Any], weights: Iterable[PackedWeight], settings: dict[str, int]) -> MemoryPlan:
    """The memory plan; ONNX Runtime's own kernels compute with float32 copies of all but the embedding table."""
    weights = list(weights)
    spec = ModelSpec.from_json(manifest["spec"])
    table = {w.name: w for w in weights}["backbone.embeddings.weight"]
    in_memory = sum(4 * w.elements for w in weights if w is not table) + table.nbytes
    if spec.tie_word_embeddings:
        in_memory += 4 * math.prod(table.shape)  # as the head it is a projection like the others
    states = [StateSpec.from_json(s) for g in manifest["graphs"].values() for s in g["state"]]
    return plan_memory(
        spec,
        states,
        slots=settings["max_sequences"],
        context=settings["max_context"],
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
    digests = ContentDigests()
    paths = [(folder / source).resolve() for source in sorted({w.source for w in weights})]
    unread = sum(p.stat().st_size for p in paths if not digests.is_known(p))
    report = progress.start("hashing weights", unread) if progress and unread else None
    return [digests.digest(path, report) for path in paths]
