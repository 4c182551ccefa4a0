# SPDX-License-Identifier: Apache-2.0
"""The header of one safetensors file, read with the strictness of the format's own reader.

A file is an 8-byte little-endian length n, n bytes of JSON, then the tensors' bytes without holes. We accept
what the ``safetensors`` package accepts, except for three things that no writer produces and that hide
damage: a name given twice, a tensor entry that is not an object, and a dtype that is not a string.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_HEADER = 100_000_000

# Bits an element, by the dtype names of the format.
DTYPE_BITS: Mapping[str, int] = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E8M0", "F8_E5M2", "F8_E4M3", "F8_E5M2FNUZ", "F8_E4M3FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}

_MAX_SIZE = 2**64 - 1
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class HeaderError(Exception):
    """The file is not a sound safetensors file; ``problems`` lists every reason that could be found."""

    def __init__(self, *problems: str, pointer: bool = False) -> None:
        super().__init__(*problems)
        self.problems = problems
        self.pointer = pointer  # a git-lfs pointer stands in for the file


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: ``nbytes`` bytes at the absolute ``offset`` of the checkpoint's ``file``."""

    name: str
    dtype: str  # as the format spells it: "BF16", "F32", "U8", "F8_E4M3", ...
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The tensors of a file in the order of their bytes, its size, and the SHA-256 of length and JSON."""

    tensors: tuple[TensorInfo, ...]
    size: int
    digest: str


def read_header(path: Path, name: str) -> Header:
    """Read and check the header of `path`; `name` becomes the tensors' ``file``.

    Raises HeaderError if the file is not sound, OSError if it cannot be read.
    """
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(0)
        prefix, after = stream.read(8), stream.read(16)
        if prefix + after == b"version https://git-lfs.":
            raise HeaderError("a git-lfs pointer, not the file itself", pointer=True)
        if len(prefix) < 8:
            raise HeaderError(f"not a safetensors file: it has only {_bytes(size)}")
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER:
            raise HeaderError(f"not a safetensors file: it announces a header of {length} bytes")
        if length > size - 8 and not after.startswith((b"{", b" ")):
            raise HeaderError("not a safetensors file: no header follows its length")
        if length > size - 8:
            raise HeaderError(f"truncated: the header needs {8 + length} bytes, the file has {size}")
        stream.seek(8)
        raw = stream.read(length)
    entries = _parse(raw)
    tensors = _check_entries(entries, name, start=8 + length)
    _check_layout(tensors, start=8 + length, size=size)
    return Header(tensors, size, hashlib.sha256(prefix + raw).hexdigest())


def unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For ``json.loads``: an object, or ValueError if a name is given twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is given more than once")
    return result


def _parse(raw: bytes) -> dict[str, Any]:
    """The header's JSON object of tensor entries, without ``__metadata__``."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=unique_object,
            parse_int=_parse_int,
            parse_float=_parse_float,
            parse_constant=_refuse_constant,
        )
        if _SURROGATE_ESCAPE.search(text):  # Python takes half a pair; UTF-8 and the format do not
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise HeaderError("the header is not JSON: nested too deeply") from None
    except ValueError as error:
        raise HeaderError(f"the header is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise HeaderError("the header is not a JSON object")
    metadata = value.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError("__metadata__ is not an object of strings")
    return value


def _parse_int(text: str) -> int | float:
    """Whole numbers beyond 64 bits, and minus zero, count as floats, as in the format's own reader."""
    if len(text) <= 20 and text != "-0":
        number = int(text)
        if -(2**63) <= number <= _MAX_SIZE:
            return number
    return _parse_float(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError("number out of range")
    return number


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _check_entries(entries: dict[str, Any], file: str, start: int) -> tuple[TensorInfo, ...]:
    """Each entry by itself: fields, types, and bytes against shape. Sorted by place in the file."""
    problems: list[str] = []
    tensors: list[TensorInfo] = []
    for name, entry in entries.items():
        problem = _entry_problem(entry)
        if problem:
            problems.append(f"{name}: {problem}")
            continue
        begin, end = entry["data_offsets"]
        tensors.append(
            TensorInfo(name, entry["dtype"], tuple(entry["shape"]), file, start + begin, end - begin)
        )
    if problems:
        raise HeaderError(*problems)
    return tuple(sorted(tensors, key=lambda t: (t.offset, t.nbytes)))


def _entry_problem(entry: object) -> str:
    if not isinstance(entry, dict) or not entry.keys() >= {"dtype", "shape", "data_offsets"}:
        return "expected an object with dtype, shape and data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        return f"unknown dtype {dtype!r}"
    if not _sizes(shape):
        return f"shape {shape!r} is not a list of sizes"
    if not _sizes(offsets) or len(offsets) != 2:
        return f"data_offsets {offsets!r} are not two positions"
    if offsets[1] < offsets[0]:
        return f"data_offsets {offsets} are inverted"
    total = 1
    for dim in shape:
        total *= dim
        if total > _MAX_SIZE:  # checked along the way, so that a later 0 does not hide it
            return f"shape {shape} overflows"
    if total * bits > _MAX_SIZE:
        return f"shape {shape} overflows"
    if total * bits % 8:
        return f"{total} elements of {dtype} do not fill whole bytes"
    if offsets[1] - offsets[0] != total * bits // 8:
        held = offsets[1] - offsets[0]
        return f"{dtype} {shape} needs {total * bits // 8} bytes, data_offsets {offsets} hold {held}"
    return ""


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(v) is int and v >= 0 for v in value)


def _check_layout(tensors: tuple[TensorInfo, ...], start: int, size: int) -> None:
    """The tensors together: they must tile the file behind its header."""
    problems: list[str] = []
    expected, previous = start, "the header"
    for tensor in tensors:
        gap = tensor.offset - expected
        if gap > 0:
            problems.append(f"{tensor.name}: {_bytes(gap)} of unused space between {previous} and it")
        elif gap < 0:
            problems.append(f"{tensor.name}: overlaps {previous} by {_bytes(-gap)}")
        end = tensor.offset + tensor.nbytes
        if end >= expected:
            expected, previous = end, tensor.name
    if expected > size:
        problems.append(f"truncated: {expected - size} of {_bytes(expected)} missing")
    elif expected < size:
        problems.append(f"{_bytes(size - expected)} of unused space after {previous}")
    if problems:
        raise HeaderError(*problems)


def _bytes(count: int) -> str:
    return "1 byte" if count == 1 else f"{count} bytes"
