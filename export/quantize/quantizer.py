# SPDX-License-Identifier: Apache-2.0
"""Quantize: plan, calibrate, pack, publish."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import nemo_build
from nemo_build.bundle import (
    read_json,
    replace_directory,
    require_output,
    sha256_file,
    sha256_json,
    write_json,
)
from nemo_build.errors import CheckpointError, UserError
from nemo_build.export.checkpoint import INDEX, OTHER_FORMATS, SINGLE, Checkpoint, TensorInfo
from nemo_build.export.ledger import Ledger, TensorRule, reconcile
from nemo_build.export.models import expected_tensors
from nemo_build.export.names import collapse
from nemo_build.export.quantize import layout
from nemo_build.export.quantize.calibration import Calibration, calibrate
from nemo_build.export.quantize.recipe import Assignment, Recipe, assign
from nemo_build.export.quantize.streaming import DTYPES, ShardJob, largest, run_jobs
from nemo_build.export.safetensors_header import read_header
from nemo_build.plugins.codecs import fp8, nvfp4
from nemo_build.plugins.formats import INPUT_SCALE, LOW_RANK, format_of
from nemo_build.spec import ModelSpec, load_spec

Engine = Literal["streaming", "modelopt"]

_SKIPPED_SUFFIXES = (".safetensors", ".index.json", *OTHER_FORMATS)
_REWRITTEN = ("config.json", "hf_quant_config.json")
_NOTES = ".nemo-build"
_JOB = "job.json"
_CALIBRATION = "calibration.json"
_MODELOPT = "modelopt.json"


class QuantizeProgress(Protocol):
    """Who is told of the progress."""

    def start(self, what: str, total: int) -> Callable[[int], None]:
        """Begin a phase of `total` units; returns what is to be called with each number of units done."""
        ...


@dataclass(frozen=True)
class QuantizeResult:
    """What a quantization did.

    Attributes:
        source: The original.
        out: The new checkpoint.
        spec: The model.
        recipe: The recipe.
        assignments: How each quantized projection is stored.
        before: Bytes by role before.
        after: Bytes by role after.
        calibration: What was measured, if the recipe needed it.
    """

    source: Path
    out: Path
    spec: ModelSpec
    recipe: Recipe
    assignments: Mapping[str, Assignment]
    before: Mapping[str, int]
    after: Mapping[str, int]
    calibration: Calibration | None


def quantize_checkpoint(
    source: Path,
    out: Path,
    recipe: Recipe,
    *,
    sequences: list[list[int]],
    sequences_source: str,
    engine: Engine | None = None,
    workers: int = 1,
    min_coverage: int = 0,
    force: bool = False,
    progress: QuantizeProgress | None = None,
) -> QuantizeResult:
    """Quantize a checkpoint.

    The new checkpoint is made in a hidden directory beside `out`; when the same job was stopped before, it goes on
    there.

    Args:
        source: An unquantized checkpoint.
        out: The directory to write.
        recipe: What is quantized how.
        sequences: Token ids to calibrate on; unused if the recipe needs no calibration.
        sequences_source: Name of the text they come from.
        engine: ``streaming`` or ``modelopt``; by default the former wherever the recipe allows.
        workers: Processes (threads, where there is one shard).
        min_coverage: Fail if fewer tokens than this chose some expert.
        force: Replace `out` if it is a quantized checkpoint of ours.
        progress: Told of the long phases.

    Raises:
        ConfigError, CheckpointError: The checkpoint is damaged, quantized already, or holds values that are not
            finite.
        UserError: The recipe does not fit, `out` cannot be written, or too few tokens reach an expert.
    """
    require_output(out, force=force, source=source, ours=_is_quantized_by_us)
    spec = load_spec(source)
    expected = expected_tensors(spec)
    checkpoint = Checkpoint.open(source)
    ledger = reconcile(checkpoint, expected)
    _require_unquantized(checkpoint, ledger)
    if engine == "streaming" and recipe.needs_modelopt:
        raise UserError(f"The recipe {recipe.name} needs the modelopt engine.")
    use_modelopt = engine == "modelopt" or recipe.needs_modelopt
    assignments = assign(recipe, expected) if recipe.rules else {}
    _require_measurable(assignments)
    if min_coverage and not recipe.needs_calibration:
        raise UserError("A minimum coverage needs a recipe that is calibrated.")
    work = out.with_name(f".{out.name}.quantize")
    job = _Job(
        source, work, checkpoint, spec, expected, recipe, assignments, sequences, sequences_source, progress
    )
    with _exclusive(work):
        identity = {"engine": "modelopt" if use_modelopt else "streaming", **_job_identity(job)}
        _open_work(work, identity)
        calibration = _calibration(job, scales=not use_modelopt) if recipe.needs_calibration else None
        if calibration:
            _require_coverage(calibration, min_coverage)
        if use_modelopt:
            assignments = _run_modelopt(job)
            kv_cache = _stored_cache(work)
        else:
            _run_streaming(job, calibration, workers)
            kv_cache = recipe.kv_cache
        _write_metadata(job, kv_cache, assignments)
        quantized = reconcile(Checkpoint.open(work), expected)
        _publish(work, out)
    before, after = ledger.bytes_by_role, quantized.bytes_by_role
    return QuantizeResult(source, out, spec, recipe, assignments, before, after, calibration)


@dataclass(frozen=True)
class _Job:
    """What the steps of one quantization work on."""

    source: Path
    work: Path
    checkpoint: Checkpoint
    spec: ModelSpec
    expected: Mapping[str, TensorRule]
    recipe: Recipe
    assignments: Mapping[str, Assignment]
    sequences: list[list[int]]
    sequences_source: str
    progress: QuantizeProgress | None


def _run_streaming(job: _Job, calibration: Calibration | None, workers: int) -> None:
    """Pack shard by shard."""
    shards = _shard_jobs(job, _scalars(job, calibration))
    total = sum(info.nbytes for info in job.checkpoint.tensors.values())
    report = job.progress.start("packing weights", total) if job.progress else None
    run_jobs(shards, workers=workers, progress=report)


def _run_modelopt(job: _Job) -> dict[str, Assignment]:
    """Let ModelOpt quantize; returns how each projection is stored, from what it wrote."""
    from nemo_build.export.quantize import modelopt_engine

    folder = job.work / "modelopt"
    done = job.work / _NOTES / _MODELOPT
    if not done.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        modelopt_engine.run(job.source, folder, job.recipe, job.assignments, job.sequences)
        for path in folder.glob("*.safetensors"):
            path.replace(job.work / path.name)
        done.touch()
    shutil.rmtree(folder, ignore_errors=True)
    written = Checkpoint.open(job.work).tensors
    found = {}
    for name, rule in job.expected.items():
        info = written.get(name)
        if not rule.projection or info is None or info.dtype in DTYPES:
            continue
        module, stored = name.removesuffix(".weight"), format_of(info.dtype)
        if stored is None:
            raise UserError(
                f"ModelOpt stored {name} as {info.dtype}, a format that this version does not have."
            )
        search = module in job.assignments and job.assignments[module].search
        low_rank = written.get(f"{module}.{LOW_RANK[0]}")
        rank = low_rank.shape[0] if low_rank else 0
        found[module] = Assignment(stored.NAME, search, f"{module}.{INPUT_SCALE}" in written, rank)
    if not found:
        raise UserError(f"The recipe {job.recipe.name} quantizes no projection.")
    return found


def _stored_cache(work: Path) -> str:
    """Whether the checkpoint has scales of an FP8 cache."""
    names = Checkpoint.open(work).tensors
    return "fp8" if any(n.endswith((".k_scale", ".v_scale")) for n in names) else "none"


def _is_quantized_by_us(directory: Path) -> bool:
    config = read_json(directory / "hf_quant_config.json")
    try:
        return str(config["producer"]["version"]).startswith("nemo-build")
    except (KeyError, TypeError):
        return False


def _require_measurable(assignments: Mapping[str, Assignment]) -> None:
    """Calibration runs the trunk; what the MTP module sees is not measured."""
    mtp = [name for name, a in assignments.items() if a.activations and name.startswith("mtp.")]
    if mtp:
        raise UserError(
            "The inputs of the MTP module cannot be rounded, for calibration does not reach them:",
            [text for text, _ in collapse(mtp)],
            "Quantize its weights only (activations: false).",
        )


def _require_unquantized(checkpoint: Checkpoint, ledger: Ledger) -> None:
    packed = [name for name, (_, info) in ledger.entries.items() if info.dtype not in DTYPES]
    if packed:
        raise CheckpointError(
            f"{checkpoint.directory} is quantized already:",
            [
                f"{text} is {ledger.entries[text][1].dtype}" if n == 1 else text
                for text, n in collapse(packed)
            ],
            "Quantize the original checkpoint.",
        )


def _job_identity(job: _Job) -> dict[str, Any]:
    """What a job depends on: another source, recipe or text is another job."""
    recipe, files = job.recipe, {}
    for name, shard in sorted(job.checkpoint.files.items()):
        status = shard.path_real.stat()
        files[name] = [shard.header_digest, status.st_size, status.st_mtime_ns]
    source = Path(recipe.modelopt) if recipe.modelopt else None
    return {
        "nemo_build": nemo_build.__version__,
        "modelopt": _modelopt_version() if recipe.needs_modelopt else None,
        "recipe_file": None if source is None else sha256_file(source),
        "checkpoint": job.checkpoint.digest,
        "files": files,
        "recipe": recipe.to_json(),
        "text": sha256_json(job.sequences) if recipe.needs_calibration else None,
    }


def _modelopt_version() -> str | None:
    try:
        return importlib.metadata.version("nvidia-modelopt")
    except importlib.metadata.PackageNotFoundError:
        return None


@contextmanager
def _exclusive(work: Path) -> Iterator[None]:
    """Hold the job's directory. Raises UserError if another process does."""
    path = work.with_name(f"{work.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        removed = True
        while removed:  # by its last holder, between our opening and our locking: then it locks nothing
            file = opened.enter_context(open(path, "w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"Another process is quantizing into {work}.") from None
            removed = os.fstat(file.fileno()).st_nlink == 0
        try:
            yield
        finally:
            path.unlink()


def _open_work(work: Path, identity: dict[str, Any]) -> None:
    """Make the working directory, or keep it if it is of the same job."""
    note = work / _NOTES / _JOB
    if read_json(note) == json.loads(json.dumps(identity)):
        return
    shutil.rmtree(work, ignore_errors=True)
    note.parent.mkdir(parents=True)
    write_json(note, identity)


def _calibration(job: _Job, *, scales: bool) -> Calibration:
    """Calibrate, or take what the stopped job had measured.

    Without `scales` only the experts' coverage is measured: ModelOpt measures its scales itself.
    """
    note = job.work / _NOTES / _CALIBRATION
    noted = read_json(note)
    if noted is not None:
        return Calibration(**noted)
    report = job.progress.start("calibrating", len(job.spec.layers)) if job.progress else None
    measured = calibrate(
        job.checkpoint,
        job.spec,
        job.sequences,
        job.assignments if scales else {},
        source=job.sequences_source,
        kv_cache=scales and job.recipe.kv_cache != "none",
        progress=report,
    )
    write_json(note, measured.to_json())
    return measured


def _require_coverage(calibration: Calibration, minimum: int) -> None:
    problems = [
        f"{layer}: experts {', '.join(map(str, experts))}"
        for layer, experts in calibration.unreached(minimum).items()
    ]
    if minimum and problems:
        raise UserError(
            f"Fewer than {minimum} of the {calibration.tokens} tokens of the calibration text choose some experts:",
            problems,
            "Calibrate on more, or more varied, text.",
        )


def _scalars(job: _Job, calibration: Calibration | None) -> dict[str, tuple[tuple[str, float], ...]]:
    """Scales of activations and caches, by the weight they are written after."""
    scalars: dict[str, list[tuple[str, float]]] = {}
    for module, assignment in job.assignments.items():
        if assignment.activations:
            assert calibration is not None, "a recipe that rounds activations is calibrated"
            scale = nvfp4.activation_scale if assignment.format == "nvfp4" else fp8.activation_scale
            amax = _positive(
                job.checkpoint, module, calibration.amax.get(_amax_key(module), 0.0), calibration
            )
            scalars.setdefault(f"{module}.weight", []).append((f"{module}.input_scale", float(scale(amax))))
    if job.recipe.kv_cache == "fp8":
        assert calibration is not None, "a recipe with an FP8 cache is calibrated"
        for name, amax in calibration.amax.items():
            if name.endswith(".output"):
                module = name.removesuffix(".output")
                amax = _positive(job.checkpoint, module, amax, calibration)
                scale_name = f"{module}.{'k' if module.endswith('k_proj') else 'v'}_scale"
                scalars.setdefault(f"{module}.weight", []).append(
                    (scale_name, float(fp8.activation_scale(amax)))
                )
    return {name: tuple(values) for name, values in scalars.items()}


def _positive(checkpoint: Checkpoint, module: str, amax: float, calibration: Calibration) -> float:
    """What was measured; where that was always zero, any scale does: the weight's largest value, or one."""
    if amax > 0:
        return amax
    if module not in calibration.unmeasured:
        calibration.unmeasured.append(module)
    return _largest_weight(checkpoint, module) or 1.0


def _amax_key(module: str) -> str:
    """All experts of a layer share one measurement a projection, as in ModelOpt."""
    prefix, dot, rest = module.partition(".experts.")
    return f"{prefix}{dot}{rest.split('.')[-1]}" if dot else module


def _shard_jobs(job: _Job, scalars: Mapping[str, tuple[tuple[str, float], ...]]) -> list[ShardJob]:
    """One job a shard."""
    amax = _shared_amax(job.checkpoint, job.assignments)
    by_file: dict[str, list[TensorInfo]] = {name: [] for name in job.checkpoint.files}
    for info in job.checkpoint.tensors.values():
        by_file[info.file].append(info)
    jobs = []
    for name, tensors in by_file.items():
        names = {t.name for t in tensors}
        jobs.append(
            ShardJob(
                job.checkpoint.files[name].path_real,
                job.work / name,
                tuple(tensors),
                {m: a for m, a in job.assignments.items() if f"{m}.weight" in names},
                {m: a for m, a in amax.items() if f"{m}.weight" in names},
                {n: s for n, s in scalars.items() if n in names},
            )
        )
    return jobs


def _shared_amax(checkpoint: Checkpoint, assignments: Mapping[str, Assignment]) -> dict[str, float]:
    """Largest weight over query, key and value of a layer in NVFP4: runtimes fuse them, so they share a scale."""
    shared: dict[str, float] = {}
    for module, assignment in assignments.items():
        prefix, _, name = module.rpartition(".")
        group = [f"{prefix}.{n}_proj" for n in "qkv"]
        if (
            name != "q_proj"
            or any(assignments.get(m) != assignment for m in group)
            or assignment.format != "nvfp4"
        ):
            continue
        shared |= dict.fromkeys(group, max(_largest_weight(checkpoint, m) for m in group))
    return shared


def _largest_weight(checkpoint: Checkpoint, module: str) -> float:
    info = checkpoint.tensors[f"{module}.weight"]
    with open(checkpoint.files[info.file].path_real, "rb") as source:
        return largest(source, info)


def _write_metadata(job: _Job, kv_cache: str, assignments: Mapping[str, Assignment]) -> None:
    """Index, configurations, and every other file of the source."""
    source, work = job.source, job.work
    for path in sorted(source.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            shutil.copytree(path, work / path.name, dirs_exist_ok=True)
        elif path.is_file() and not path.name.endswith(_SKIPPED_SUFFIXES) and path.name not in _REWRITTEN:
            shutil.copyfile(path, work / path.name)
    unquantizable = ("gate.weight", "conv1d.weight", "embeddings.weight")
    kept = [
        n.removesuffix(".weight")
        for n, r in job.expected.items()
        if r.projection or n.endswith(unquantizable)
    ]
    quant = layout.hf_quant_config(assignments, [k for k in kept if k not in assignments], kv_cache)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = layout.quantization_config(quant)
    (work / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (work / "hf_quant_config.json").write_text(json.dumps(quant, indent=4) + "\n", encoding="utf-8")
    headers = {path.name: read_header(path, path.name) for path in sorted(work.glob("*.safetensors"))}
    if list(headers) != [SINGLE]:
        tensors = [info for header in headers.values() for info in header.tensors]
        index = {
            "metadata": {"total_size": sum(info.nbytes for info in tensors)},
            "weight_map": {info.name: info.file for info in sorted(tensors, key=lambda info: info.name)},
        }
        (work / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _publish(work: Path, out: Path) -> None:
    """Drop the job's notes and give the directory its name."""
    shutil.rmtree(work / _NOTES)
    if out.exists():
        replace_directory(work, out)
    else:
        work.rename(out)
