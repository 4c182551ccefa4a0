# SPDX-License-Identifier: Apache-2.0
"""Build: a model bundle becomes an engine bundle for one target."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
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
from nemo_build.engines.lowering import lower, set_precision
from nemo_build.engines.options import ACTIVATIONS, CONVERSIONS, WEIGHTS
from nemo_build.engines.plan import MemoryPlan, host_memory, plan_memory
from nemo_build.engines.provenance import kernel_interface
from nemo_build.engines.targets import Target, find_target, require_backend
from nemo_build.engines.weights import (
    PlacedWeight,
    StoredTensor,
    Weight,
    copied_weights,
    place,
    point_at,
    stored_tensors,
    write_packed,
)
from nemo_build.errors import BundleError, UserError
from nemo_build.export.placement import WEIGHTS_FOLDER
from nemo_build.export.safetensors_header import HeaderError, read_header
from nemo_build.plugins import native
from nemo_build.spec import ModelSpec
from nemo_build.state import declared_states

WEIGHTS_FILE = "weights.bin"
EMBEDDINGS = "backbone.embeddings.weight"


@dataclass(frozen=True)
class BuildOptions:
    """What a build may be asked for.

    Attributes:
        max_sequences: Sequences at a time.
        max_context: Positions per sequence; ``None`` means the model's limit, but at most 8192.
        memory: Bytes that the engine may use; ``None`` means all of the target's.
        weights: A name of :data:`~nemo_build.engines.options.WEIGHTS`.
        activations: What projections round their inputs to, ``float32``, ``bfloat16`` or ``int8``; ``auto`` is
            bfloat16 for a checkpoint in bfloat16, else float32. Sums are float32 always.
        phases: Of a backend with several graphs for a step, which ones, with commas between them.
        gpus: Of a backend that compiles, ``target`` for the target's GPU, ``all`` for all it knows.
        timing_cache: Of TensorRT, a file with timings of kernels; ``None``: one in the build cache.
        optimization_level: Of TensorRT, how hard it tries, 0 to 5; ``None``: as it does by itself.
        backend: One of the target's backends; ``None``: the first that builds.
    """

    max_sequences: int = 8
    max_context: int | None = None
    memory: int | None = None
    weights: str = "auto"
    activations: str = "auto"
    phases: str = "decode,prefill"
    gpus: str = "target"
    timing_cache: str | None = None
    optimization_level: int | None = None
    backend: str | None = None


@dataclass(frozen=True)
class BuildResult:
    """What a build did: the engine's directory, its plan, its cache key, and whether the cache had it."""

    out: Path
    plan: MemoryPlan
    key: str
    cached: bool


@dataclass(frozen=True)
class Inputs:
    """What a build reads.

    Attributes:
        bundle: The model bundle's directory.
        folder: Where the checkpoint's files are.
        manifest: The bundle's manifest.
        models: The portable graphs by name.
        tensors: The checkpoint's tensors that they refer to, by name.
    """

    bundle: Path
    folder: Path
    manifest: dict[str, Any]
    models: dict[str, onnx.ModelProto]
    tensors: dict[str, StoredTensor]


@dataclass(frozen=True)
class Written:
    """What a maker wrote, for the manifest.

    Attributes:
        graphs: What it says of each graph.
        weight_files: Digests of the files with weights.
        tensors: The weights in them.
        files: Digests of other files; they are compared when the engine is opened.
    """

    graphs: dict[str, dict[str, Any]]
    weight_files: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    files: dict[str, str] = field(default_factory=dict)


class Maker(Protocol):
    """What makes an engine of some inputs with one backend.

    Attributes:
        settings: The options with defaults filled in.
        backend: The backend's name and version, and what else the manifest says of it.
        plan: What the engine needs in memory.
    """

    settings: dict[str, Any]
    backend: dict[str, Any]
    plan: MemoryPlan

    def available(self, options: BuildOptions) -> tuple[int, str]:
        """Bytes that the plan may take, and of what."""
        ...

    def write(
        self, directory: Path, out: Path, digests: list[str], progress: BuildProgress | None
    ) -> Written:
        """Write graphs and weights into a directory, which is to become `out`; `digests` are those of the shards."""
        ...


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
        options: Sizes, and how weights are held.
        use_cache: Take the engine from the build cache, or add it there.
        force: Replace `out` if it is a bundle.
        progress: Told of the long phases.

    Raises:
        BundleError: The bundle is missing or damaged, or its checkpoint has changed since.
        PlanError: The engine cannot fit the target's memory.
        UserError: Unknown or unavailable target, or `out` exists.
    """
    options = options or BuildOptions()
    rule = require_backend(target, options.backend)
    require_output(out, force=force, source=bundle)
    manifest = read_manifest(bundle, MODEL_BUNDLE)
    check_files(bundle, manifest["files"] | {g["file"]: g["sha256"] for g in manifest["graphs"].values()})
    folder = Path(manifest["weights"]["folder"] or bundle)
    models = {
        name: onnx.load(bundle / g["file"], load_external_data=False)
        for name, g in manifest["graphs"].items()
    }
    tensors = stored_tensors(models.values())
    _check_shards(manifest, folder, tensors.values())
    inputs = Inputs(bundle, folder, manifest, models, tensors)
    maker = _MAKERS[rule.name](inputs, find_target(target), options)
    maker.plan.require(*maker.available(options))
    contents = _content_digests(folder, tensors.values(), progress)
    provenance = {
        "nemo_build": nemo_build.__version__,
        "engine_format": FORMAT_VERSION,
        "target": target,
        "backend": maker.backend,
        "kernels": kernel_interface(),
        "options": maker.settings,
        "inputs": {
            "checkpoint_digest": manifest["checkpoint"]["digest"],
            "drafter_digests": {kind: d["checkpoint"]["digest"] for kind, d in manifest["drafters"].items()},
            "shards_sha256": contents,
            "graphs_sha256": {name: g["sha256"] for name, g in manifest["graphs"].items()},
            "files_sha256": manifest["files"],
        },
    }
    key = sha256_json(provenance)

    def fill(directory: Path) -> None:
        _write_engine(directory, out, inputs, maker, provenance, progress)

    # An engine in place shares its files with the checkpoint, which the cache must not make read-only.
    if not use_cache or maker.settings["weights"] == "in-place":
        with publish(out) as directory:
            fill(directory)
        return BuildResult(out, maker.plan, key, cached=False)
    cache = EngineCache(key)
    with cache.lock(), publish(out) as directory:
        cached = cache.is_complete()
        if not cached:
            cache.store(fill)
        cache.copy_to(directory)
    return BuildResult(out, maker.plan, key, cached)


def _write_engine(
    directory: Path,
    out: Path,
    inputs: Inputs,
    maker: Maker,
    provenance: dict[str, Any],
    progress: BuildProgress | None,
) -> None:
    """Write all files of an engine into an empty directory."""
    manifest = inputs.manifest
    written = maker.write(directory, out, provenance["inputs"]["shards_sha256"], progress)
    files = written.files | copy_files(inputs.bundle, directory, manifest["files"])
    content = {
        **provenance,
        "spec": manifest["spec"],
        "graph_options": manifest["graph_options"],
        "drafters": manifest["drafters"],
        "graphs": written.graphs,
        "plan": maker.plan.to_json(),
        "files": files,
        "sizes": {
            str(path.relative_to(directory)): path.stat().st_size
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        },
        "weights": {"files": written.weight_files, "tensors": written.tensors},
    }
    write_manifest(directory, ENGINE_BUNDLE, content)


class _Packing:
    """An engine for ONNX Runtime on a CPU: the graphs, and a file of weights."""

    def __init__(self, inputs: Inputs, target: Target, options: BuildOptions) -> None:
        self.settings = _settings(inputs.manifest, options, inputs.tensors)
        self.backend: dict[str, Any] = {"name": "onnxruntime", "version": onnxruntime.__version__}
        self._inputs = inputs
        self._weights = _weights(inputs.models.values(), self.settings)
        self.plan = _plan(inputs.manifest, self._weights, self.settings)

    def available(self, options: BuildOptions) -> tuple[int, str]:
        """The machine's memory, unless asked otherwise."""
        if options.memory is None:
            return host_memory(), "this machine"
        return options.memory, "the memory allowed"

    def write(
        self, directory: Path, out: Path, digests: list[str], progress: BuildProgress | None
    ) -> Written:
        """Pack or link the weights, and write the graphs that refer to them."""
        weights, folder = self._weights, self._inputs.folder
        in_place = self.settings["weights"] == "in-place"
        if in_place:
            weight_files = _link_shards(directory, folder, weights, digests)
        else:
            total = sum(w.weight.nbytes for w in weights)
            report = progress.start("packing weights", total) if progress else None
            weight_files = {WEIGHTS_FILE: write_packed(weights, folder, directory / WEIGHTS_FILE, report)}
        graphs = {}
        for name, model in self._inputs.models.items():
            if in_place:
                _point_at_links(model)
            else:
                point_at(model, weights, WEIGHTS_FILE)
            path = directory / f"{name}.onnx"
            path.write_bytes(model.SerializeToString(deterministic=True))
            entry = self._inputs.manifest["graphs"][name]
            graphs[name] = {**entry, "file": path.name, "sha256": sha256_file(path)}
        return Written(graphs, weight_files, {w.weight.name: w.to_json() for w in weights})


def _compiling(inputs: Inputs, target: Target, options: BuildOptions) -> Maker:
    from nemo_build.engines.tensorrt_rtx.build import Compiling

    return Compiling(inputs, target, options)


def _tensorrt(inputs: Inputs, target: Target, options: BuildOptions) -> Maker:
    from nemo_build.engines.tensorrt.build import Compiling

    return Compiling(inputs, target, options)


def _launching(inputs: Inputs, target: Target, options: BuildOptions) -> Maker:
    from nemo_build.engines.ort_cuda.build import Launching

    return Launching(inputs, target, options)


_MAKERS: Mapping[str, Callable[[Inputs, Target, BuildOptions], Maker]] = {
    "onnxruntime": _Packing,
    "tensorrt-rtx": _compiling,
    "tensorrt": _tensorrt,
    "onnxruntime-cuda": _launching,
}
"""What makes engines, by the backend's name."""


def size_settings(manifest: Mapping[str, Any], options: BuildOptions) -> tuple[dict[str, int], list[str]]:
    """The sizes of an engine with defaults filled in, and what makes no sense of them."""
    limit = int(manifest["spec"]["max_positions"])
    context = min(limit, 8192) if options.max_context is None else options.max_context
    problems = []
    if options.max_sequences < 1:
        problems.append(f"--max-sequences is {options.max_sequences}; it must be at least 1")
    if not 1 <= context <= limit:
        problems.append(f"--max-context is {context}; the model allows 1 to {limit}")
    return {"max_sequences": options.max_sequences, "max_context": context}, problems


def tensorrt_problems(options: BuildOptions) -> list[str]:
    """What is asked for that only TensorRT has, for the other backends to refuse."""
    asked = {
        "--timing-cache": options.timing_cache,
        "--optimization-level": options.optimization_level,
    }
    return [f"{name} is for TensorRT" for name, value in asked.items() if value is not None]


def _settings(
    manifest: dict[str, Any], options: BuildOptions, tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """The options with defaults filled in; what makes no sense is refused."""
    sizes, problems = size_settings(manifest, options)
    weights = options.weights
    if weights == "auto":
        weights = "packed" if native.chosen() else "plain"
    natively = weights != "plain" and native.chosen() is not None
    activations = options.activations
    if activations == "auto":
        rounded = natively and tensors[EMBEDDINGS].dtype == "BF16"
        activations = "bfloat16" if rounded else "float32"
    if weights not in WEIGHTS:
        problems.append(f"--weights is {weights}; there are {', '.join(WEIGHTS)}")
    elif weights not in ("plain", "in-place") and not native.chosen():
        problems.append(
            f"--weights {weights} needs the native kernels, which are not to be had (nemo-build doctor)"
        )
    if activations not in ACTIVATIONS:
        problems.append(f"--activations is {activations}; there are {', '.join(ACTIVATIONS)}")
    elif activations != "float32" and not natively:
        problems.append(
            f"--activations {activations} needs the native kernels, and not --weights plain, which computes in float32"
        )
    if (options.phases, options.gpus) != (BuildOptions.phases, BuildOptions.gpus):
        problems.append("--phases and --gpus are for targets whose engines are compiled; cpu has one graph")
    problems += tensorrt_problems(options)
    if problems:
        raise UserError("The engine cannot be built as asked:", problems)
    return {**sizes, "weights": weights, "activations": activations}


def _weights(models: Iterable[onnx.ModelProto], settings: Mapping[str, Any]) -> list[PlacedWeight]:
    """The engine's weights; the graphs are lowered for the native kernels where they are asked for."""
    models = list(models)
    kind, precision = settings["weights"], settings["activations"]
    packed: dict[str, Weight] = {}
    if kind == "in-place":
        for model in models:
            set_precision(model, precision)
        return [PlacedWeight(w, w.tensor.offset) for w in copied_weights(models).values()]
    if kind != "plain":
        packed = lower(models, precision=precision, convert=kind if kind in CONVERSIONS else None)
    return place([*packed.values(), *copied_weights(models, besides=packed).values()])


def _plan(
    manifest: dict[str, Any], weights: Iterable[PlacedWeight], settings: Mapping[str, Any]
) -> MemoryPlan:
    """The memory plan. Without native kernels, and with plain weights, ONNX Runtime's own run the engine."""
    tensors = [w.weight for w in weights]
    spec = ModelSpec.from_json(manifest["spec"])
    mapped = settings["weights"] == "in-place" and native.chosen() is not None
    in_memory = sum(t.nbytes if mapped else t.memory() for t in tensors)
    return plan_memory(
        spec,
        declared_states(manifest["graphs"].values()),
        slots=settings["max_sequences"],
        context=settings["max_context"],
        weights_file=sum(t.nbytes for t in tensors),
        weights_memory=in_memory,
        native=settings["weights"] != "plain" and native.chosen() is not None,
    )


def _link_shards(
    directory: Path, folder: Path, weights: Iterable[PlacedWeight], shards_sha256: list[str]
) -> dict[str, str]:
    """Hard links to the checkpoint's files inside the engine; returns their sha256 by name."""
    sources = sorted({t.source for w in weights for t in w.weight.sources()})
    digests = dict(zip(sources, shards_sha256, strict=True))
    linked = {}
    for source in sources:
        name = _link_name(source)
        try:
            os.link((folder / source).resolve(), directory / name)
        except OSError as error:
            raise UserError(
                f"Cannot hard-link {folder / source} into the engine: {error.strerror}.",
                hint="Write the engine to the checkpoint's file system, or build with --weights packed.",
            ) from error
        linked[name] = digests[source]
    return linked


def _link_name(source: str) -> str:
    return "shard-" + source.removeprefix(f"{WEIGHTS_FOLDER}/").replace("/", "-")


def _point_at_links(model: onnx.ModelProto) -> None:
    """Make the external weights refer to the links."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = _link_name(entry.value)


def _check_shards(manifest: dict[str, Any], folder: Path, tensors: Iterable[StoredTensor]) -> None:
    """Raise BundleError if a shard is gone or its size or header is not what was exported."""
    sources = sorted({t.source for t in tensors})
    drafters = manifest["drafters"].values()
    known = [f for c in (manifest, *drafters) for f in c["checkpoint"]["files"].values()]
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
    folder: Path, tensors: Iterable[StoredTensor], progress: BuildProgress | None
) -> list[str]:
    """Sha256 of every shard's contents, in order of their names."""
    digests = ContentDigests()
    paths = [(folder / source).resolve() for source in sorted({t.source for t in tensors})]
    unread = sum(p.stat().st_size for p in paths if not digests.is_known(p))
    report = progress.start("hashing weights", unread) if progress and unread else None
    return [digests.digest(path, report) for path in paths]
