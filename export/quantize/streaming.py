# SPDX-License-Identifier: Apache-2.0
"""The streaming engine: shard by shard, tensor by tensor, a few rows of a tensor in memory at a time.

A job writes into a hidden directory beside its output. A shard that is complete there is not written again, so a
job that was killed goes on where it was and ends with the same bytes.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.errors import CheckpointError
from nemo_build.export.checkpoint import TensorInfo
from nemo_build.export.quantize.recipe import Assignment
from nemo_build.plugins.codecs import checks, fp8, nvfp4

DTYPES: Mapping[str, Any] = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
"""NumPy types of the safetensors dtypes that can be quantized."""

_ROWS_BYTES = 1 << 25
_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class OutputTensor:
    """A tensor of an output shard: copied from the source, computed from it, or given."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class ShardJob:
    """What one output shard is made of. Plain data, so that a process of its own can run it.

    Attributes:
        source: The source file.
        target: The file to write.
        tensors: The source's tensors, in order.
        assignments: How projections are stored, by module.
        amax: Largest weight of groups that share their scale, by module (NVFP4 query, key and value).
        scalars: Float32 scalars to add after a tensor, by that tensor's name: (name, value).
    """

    source: Path
    target: Path
    tensors: tuple[TensorInfo, ...]
    assignments: Mapping[str, Assignment]
    amax: Mapping[str, float]
    scalars: Mapping[str, tuple[tuple[str, float], ...]]


def run_jobs(jobs: list[ShardJob], *, workers: int, progress: Callable[[int], None] | None = None) -> None:
    """Run the jobs whose shard is not there yet.

    Args:
        jobs: The jobs.
        workers: Processes; threads, if there is one shard.
        progress: Called with the source bytes of each finished shard.

    Raises:
        CheckpointError: A weight holds values that are not finite; the tensor and the first place are named.
    """

    def report(job: ShardJob) -> None:
        if progress:
            progress(sum(t.nbytes for t in job.tensors))

    left = []
    for job in jobs:
        if job.target.is_file():
            report(job)
        else:
            left.append(job)
    if workers == 1 or len(left) <= 1:
        for job in left:
            run_job(job, threads=workers)
            report(job)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run_job, job): job for job in left}
        try:
            for future in as_completed(running):
                future.result()
                report(running[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_job(job: ShardJob, threads: int = 1) -> None:
    """Write one shard under a temporary name and give it its own when it is complete."""
    temporary = job.target.with_suffix(".partial")
    with open(job.source, "rb") as source, open(temporary, "wb") as target:
        target.write(_header([out for info in job.tensors for out in _outputs(job, info)]))
        for info in job.tensors:
            assignment = _assignment(job, info)
            if assignment is None:
                _copy(source, target, info)
            else:
                amax = job.amax.get(info.name.removesuffix(".weight"))
                _quantize(source, target, info, assignment, amax, threads)
            for _, value in job.scalars.get(info.name, ()):
                target.write(struct.pack("<f", value))
        target.flush()
        os.fsync(target.fileno())
    temporary.rename(job.target)


def _assignment(job: ShardJob, info: TensorInfo) -> Assignment | None:
    """How a tensor is to be stored; ``None`` if it is copied."""
    module = info.name.removesuffix(".weight")
    return job.assignments.get(module) if module != info.name else None


def _outputs(job: ShardJob, info: TensorInfo) -> Iterator[OutputTensor]:
    """What a source tensor becomes."""
    module = info.name.removesuffix(".weight")
    assignment = _assignment(job, info)
    if assignment is None:
        yield OutputTensor(info.name, info.dtype, info.shape, info.nbytes)
    else:
        rows, columns = info.shape
        if assignment.format == "nvfp4":
            yield OutputTensor(info.name, "U8", (rows, columns // 2), rows * columns // 2)
            yield OutputTensor(
                f"{module}.weight_scale",
                "F8_E4M3",
                (rows, columns // nvfp4.BLOCK),
                rows * columns // nvfp4.BLOCK,
            )
            yield OutputTensor(f"{module}.weight_scale_2", "F32", (), 4)
        else:
            yield OutputTensor(info.name, "F8_E4M3", (rows, columns), rows * columns)
            yield OutputTensor(f"{module}.weight_scale", "F32", (), 4)
    for name, _ in job.scalars.get(info.name, ()):
        yield OutputTensor(name, "F32", (), 4)


def _header(outputs: list[OutputTensor]) -> bytes:
    """A safetensors header; the same outputs give the same bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for out in outputs:
        entries[out.name] = {
            "dtype": out.dtype,
            "shape": list(out.shape),
            "data_offsets": [at, at + out.nbytes],
        }
        at += out.nbytes
    data = json.dumps(entries, separators=(",", ":")).encode()
    data += b" " * (-len(data) % 8)
    return struct.pack("<Q", len(data)) + data


def _copy(source: IO[bytes], target: IO[bytes], info: TensorInfo) -> None:
    source.seek(info.offset)
    left = info.nbytes
    while left:
        chunk = source.read(min(left, _COPY_BYTES))
        if not chunk:
            raise CheckpointError(f"{info.file} ends within {info.name}.")
        target.write(chunk)
        left -= len(chunk)


def _quantize(
    source: IO[bytes],
    target: IO[bytes],
    info: TensorInfo,
    assignment: Assignment,
    amax: float | None,
    threads: int,
) -> None:
    """Write codes and scales of one weight; several passes over its rows, the first for the largest value."""
    if amax is None:
        amax = largest(source, info)
    if assignment.format == "fp8" and assignment.search:
        amax = float(
            fp8.choose_amax(
                amax,
                DTYPES[info.dtype],
                lambda a: sum(
                    fp8.squared_error(rows, a, threads=threads) for rows in _row_chunks(source, info)
                ),
            )
        )
    block_scales = bytearray()
    for rows in _row_chunks(source, info):
        if assignment.format == "nvfp4":
            packed = nvfp4.encode(rows, four_over_six=assignment.search, amax=amax, threads=threads)
            target.write(packed.codes.tobytes())
            block_scales += packed.scales.tobytes()
            scale = packed.scale_2
        else:
            coded = fp8.encode(rows, amax=amax, threads=threads)
            target.write(coded.codes.tobytes())
            scale = coded.scale
    target.write(block_scales)
    target.write(struct.pack("<f", float(scale)))


def largest(source: IO[bytes], info: TensorInfo) -> float:
    """The largest absolute value of a weight.

    Raises:
        CheckpointError: It holds values that are not finite.
    """
    amax = 0.0
    first_row = 0
    for rows in _row_chunks(source, info):
        try:
            amax = max(amax, float(checks.finite_amax(rows)))
        except ValueError:
            row, column = np.argwhere(~np.isfinite(rows.astype(np.float32)))[0]
            place = [int(row) + first_row, int(column)]
            raise CheckpointError(
                f"{info.name} cannot be quantized: it holds values that are not finite, the first at {place}."
            ) from None
        first_row += len(rows)
    return amax


def _row_chunks(source: IO[bytes], info: TensorInfo) -> Iterator[NDArray[Any]]:
    """The rows of a matrix, some at a time."""
    dtype = np.dtype(DTYPES[info.dtype])
    rows, columns = info.shape
    step = max(1, _ROWS_BYTES // (columns * dtype.itemsize))
    for start in range(0, rows, step):
        count = min(step, rows - start)
        source.seek(info.offset + start * columns * dtype.itemsize)
        data = source.read(count * columns * dtype.itemsize)
        if len(data) != count * columns * dtype.itemsize:
            raise CheckpointError(f"{info.file} ends within {info.name}.")
        yield np.frombuffer(data, dtype).reshape(count, columns)
