# SPDX-License-Identifier: Apache-2.0
"""The codecs' C++ kernels (``pack.cc``).

The library is optional: where it was not built (no compiler, another processor, a source checkout that was not
installed), the encoders use their NumPy references. It is no Python module, only a shared library beside this
file, which ctypes loads; calls release the interpreter lock. The functions below take contiguous arrays and trust
their callers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.libraries import REFERENCE, Forced, library_file

Array = NDArray[Any]
Bytes = NDArray[np.uint8]

#: The dtypes of weights, in the kernels' numbering.
DTYPES = (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
#: Instruction sets, in the kernels' numbering.
SETS = ("plain", "avx2", "avx512")
#: Number of the interface this file expects of the library.
INTERFACE = 1
#: Values a task of a thread gets: the working set of a core's cache, and of a sum in a fixed order.
CHUNK = 1 << 20


class Plan(ctypes.Structure):
    """The constants of a tensor that ``nvfp4`` computes; ``pack.cc`` says what they are."""

    _fields_ = [
        ("scale_2", ctypes.c_float),
        ("divisor", ctypes.c_float),
        ("to_fake", ctypes.c_float),
        ("from_fake", ctypes.c_float),
    ]


@cache
def _library() -> ctypes.CDLL | None:
    path = library_file(Path(__file__).parent, "pack")
    if path is None:
        return None
    try:
        library = ctypes.CDLL(str(path))
        library.nemo_fp8_error.restype = ctypes.c_double
        return library if library.nemo_interface() == INTERFACE else None
    except (OSError, AttributeError):
        return None  # built for another processor, or from older sources


@cache
def instruction_sets() -> tuple[str, ...]:
    """The instruction sets this processor has kernels for, best last; empty if the library was not built."""
    library = _library()
    return () if library is None else tuple(s for i, s in enumerate(SETS) if library.nemo_supports(i))


def available() -> bool:
    """Whether the C++ kernels are there."""
    return bool(instruction_sets())


def describe() -> str:
    """The instruction set in use: "avx512", "avx2", "plain", or "not built"."""
    return instruction_sets()[-1] if available() else "not built"


forced = Forced(lambda: instruction_sets())
"""Use one instruction set in this process for a while; see :class:`Forced`."""


def in_use() -> bool:
    """Whether encoders are to call the kernels."""
    return available() and forced.name != REFERENCE


def _call(function: str, *arguments: object) -> Any:
    name = forced.name or describe()
    return getattr(_library(), function)(ctypes.c_int(SETS.index(name)), *arguments)


def _pointer(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _dtype(weight: Array) -> ctypes.c_int:
    return ctypes.c_int(DTYPES.index(weight.dtype))


def _over_chunks(count: int, threads: int, work: Callable[[int, int], Any]) -> list[Any]:
    """Run ``work(start, stop)`` over ``range(count)`` in chunks, on several threads; results in order."""
    starts = range(0, count, CHUNK)
    spans = [(start, min(start + CHUNK, count)) for start in starts]
    if threads <= 1 or len(spans) == 1:
        return [work(*span) for span in spans]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda span: work(*span), spans))


def amax(weight: Array, threads: int) -> np.float32 | None:
    """The largest magnitude of a weight; None if values are NaN or infinite."""
    flat = weight.reshape(-1)

    def span(start: int, stop: int) -> np.float32 | None:
        top, count = ctypes.c_float(), ctypes.c_int64(stop - start)
        finite = _call("nemo_amax", _dtype(flat), _pointer(flat[start:]), count, ctypes.byref(top))
        return np.float32(top.value) if finite else None

    tops = _over_chunks(flat.size, threads, span)
    return None if None in tops else np.float32(max(tops))


def nvfp4_encode(weight: Array, plan: Plan, four_over_six: bool, threads: int) -> tuple[Bytes, Bytes]:
    """Codes ``[n/2]`` and scale bytes ``[n/16]`` of a weight of n values in whole blocks."""
    flat = weight.reshape(-1)
    codes, scales = np.empty(flat.size // 2, np.uint8), np.empty(flat.size // 16, np.uint8)

    def span(start: int, stop: int) -> None:
        outputs = _pointer(codes[start // 2 :]), _pointer(scales[start // 16 :])
        blocks = ctypes.c_int64((stop - start) // 16)
        mode = ctypes.c_int(four_over_six)
        _call(
            "nemo_nvfp4_encode",
            _dtype(flat),
            mode,
            _pointer(flat[start:]),
            blocks,
            ctypes.byref(plan),
            *outputs,
        )

    _over_chunks(flat.size, threads, span)
    return codes, scales


def nvfp4_decode(codes: Bytes, scales: Bytes, scale_2: np.float32, threads: int) -> NDArray[np.float32]:
    """Values ``[n]`` of contiguous codes and scales."""
    out = np.empty(codes.size * 2, np.float32)
    flat, flat_scales = codes.reshape(-1), scales.reshape(-1)

    def span(start: int, stop: int) -> None:
        inputs = _pointer(flat[start // 2 :]), _pointer(flat_scales[start // 16 :])
        blocks = ctypes.c_int64((stop - start) // 16)
        _call("nemo_nvfp4_decode", *inputs, blocks, ctypes.c_float(float(scale_2)), _pointer(out[start:]))

    _over_chunks(out.size, threads, span)
    return out


def fp8_encode(weight: Array, scale: np.float32, threads: int) -> Bytes:
    """Codes ``[n]`` of a weight of n values."""
    flat = weight.reshape(-1)
    codes = np.empty(flat.size, np.uint8)

    def span(start: int, stop: int) -> None:
        count = ctypes.c_int64(stop - start)
        _call(
            "nemo_fp8_encode",
            _dtype(flat),
            _pointer(flat[start:]),
            count,
            ctypes.c_float(float(scale)),
            _pointer(codes[start:]),
        )

    _over_chunks(flat.size, threads, span)
    return codes


def fp8_error(weight: Array, to_fake: np.float32, from_fake: np.float32, threads: int) -> float:
    """Sum of the squared errors of E4M3 at the given factors."""
    flat = weight.reshape(-1)

    def span(start: int, stop: int) -> float:
        factors = ctypes.c_float(float(to_fake)), ctypes.c_float(float(from_fake))
        error: float = _call(
            "nemo_fp8_error", _dtype(flat), _pointer(flat[start:]), ctypes.c_int64(stop - start), *factors
        )
        return error

    return float(sum(_over_chunks(flat.size, threads, span)))
