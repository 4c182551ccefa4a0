# SPDX-License-Identifier: Apache-2.0
"""Reading safetensors headers and checkpoint directories: agreement with safetensors, layouts, errors."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from nemo_build.errors import CheckpointError
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.safetensors_header import DTYPE_BITS, Header, HeaderError, read_header

Entry = dict[str, Any]
PROPERTY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 12345\n"


def entry(dtype: str = "BF16", shape: list[int] | None = None, begin: int = 0) -> Entry:
    """A consistent header entry; by default two bytes for one element."""
    shape = [1] if shape is None else shape
    bits = DTYPE_BITS[dtype]
    for dim in shape:
        bits *= dim
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + bits // 8]}


def pack(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensors(*names: str) -> bytes:
    """A sound file with a BF16 scalar vector for each name."""
    header = {name: entry(begin=2 * i) for i, name in enumerate(names)}
    return pack(header, bytes(2 * len(names)))


def index(**files: list[str]) -> bytes:
    """An index by file, where ``_1_3`` names the first of three shards; see `shard`."""
    return json.dumps({"weight_map": {t: shard(f) for f, names in files.items() for t in names}}).encode()


def shard(key: str) -> str:
    """``_1_3`` -> ``model-00001-of-00003.safetensors``."""
    _, i, n = key.split("_")
    return f"model-{int(i):05}-of-{int(n):05}.safetensors"


def write(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (directory / name).write_bytes(content)


def golden(file: str) -> dict[str, str]:
    """The messages of a golden file: ``## name`` on a line, then the text."""
    text = (Path(__file__).parent / "golden" / file).read_text(encoding="utf-8")
    return {name: body.strip() for name, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", text, re.M)}


# --- agreement with the safetensors package ---------------------------------------------------------------


@st.composite
def sound_headers(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A valid header, and the size of its data."""
    header: dict[str, Any] = {}
    position = 0
    names = st.text(max_size=8) | st.sampled_from(["backbone.norm_f.weight", "é", "\x00", "漢"])
    for name in draw(st.lists(names.filter(lambda n: n != "__metadata__"), unique=True, max_size=6)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if DTYPE_BITS[dtype] < 8:
            shape.append(4 * draw(st.integers(0, 2)))  # whole bytes
        header[name] = entry(dtype, shape, position)
        position = header[name]["data_offsets"][1]
    order = draw(st.permutations(list(header)))
    header = {name: header[name] for name in order}
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.none() | st.dictionaries(st.text(max_size=3), st.text(max_size=3)))
    return header, position


def reference(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | str:
    """What the safetensors package finds in a file, or why it refuses it."""
    try:
        with safe_open(path, framework="np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        return str(error)


def ours(path: Path) -> Header | HeaderError:
    try:
        return read_header(path, path.name)
    except HeaderError as error:
        return error


STRICTER = re.compile(r"is given more than once|expected an object with|unknown dtype \{")


def check_agreement(path: Path) -> None:
    """Both accept the file and find the same tensors, or both refuse it."""
    theirs, mine = reference(path), ours(path)
    if isinstance(mine, HeaderError):
        assert isinstance(theirs, str) or any(map(STRICTER.search, mine.problems)), mine.problems
    else:
        assert not isinstance(theirs, str), theirs
        assert {t.name: (t.dtype, t.shape) for t in mine.tensors} == theirs


@PROPERTY
@given(sound_headers(), st.sampled_from(["", "  ", "\n\t "]), st.booleans())
def test_sound_files(tmp_path: Path, sound: tuple[dict[str, Any], int], padding: str, ascii_: bool) -> None:
    header, size = sound
    path = tmp_path / "model.safetensors"
    text = (json.dumps(header, ensure_ascii=ascii_) + padding).encode()
    data = bytes(i % 251 for i in range(size))
    path.write_bytes(pack(text, data))
    check_agreement(path)
    checkpoint = Checkpoint.open(tmp_path)
    raw = path.read_bytes()
    assert set(checkpoint.tensors) == header.keys() - {"__metadata__"}
    for name, info in checkpoint.tensors.items():
        begin, end = header[name]["data_offsets"]
        assert raw[info.offset : info.offset + info.nbytes] == data[begin:end]
        assert info.file == "model.safetensors"


Edit = tuple[int, bytes, int]
edits = st.lists(
    st.tuples(st.integers(0, 10**6), st.binary(max_size=2), st.integers(0, 2)), min_size=1, max_size=3
)


@PROPERTY
@given(sound_headers(), edits, st.booleans())
def test_mutated_bytes(
    tmp_path: Path, sound: tuple[dict[str, Any], int], changes: list[Edit], fit: bool
) -> None:
    """Random bytes replaced; with `fit` only within the JSON, whose length is then corrected."""
    header, size = sound
    text = json.dumps(header).encode()
    raw = text if fit else pack(text, bytes(size))
    for position, new, cut in changes:
        position %= len(raw) + 1
        raw = raw[:position] + new + raw[position + cut :]
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(raw, bytes(size)) if fit else raw)
    check_agreement(path)


ODD: list[Any] = [0, 1, -1, 2**63, 2**64 - 1, 2**64, 10**25, 1.0, True, None, "F32", "BF16", "f32", "F4"]
ODD += [[], [0, 2], [2, 0], [1], {}]
odd_values = st.sampled_from(ODD).map(copy.deepcopy)


@PROPERTY
@given(sound_headers(), st.data())
def test_mutated_values(tmp_path: Path, sound: tuple[dict[str, Any], int], data: st.DataObject) -> None:
    """Values of the header replaced by odd ones, entries copied, the data lengthened or cut."""
    header, size = sound
    for name in data.draw(st.lists(st.sampled_from(sorted(header) or ["new"]), min_size=1, max_size=2)):
        target = header.get(name)
        what = data.draw(st.sampled_from(["field", "element", "copy", "drop", "whole", "extra"]))
        if what == "copy":
            header[name + "'"] = target
        elif what == "whole" or not isinstance(target, dict) or not target:
            header[name] = data.draw(odd_values)
        else:
            key = data.draw(st.sampled_from(sorted(target)))
            if what == "drop":
                del target[key]
            elif what == "element" and isinstance(target[key], list) and target[key]:
                target[key][data.draw(st.integers(0, len(target[key]) - 1))] = data.draw(odd_values)
            else:
                target["extra" if what == "extra" else key] = data.draw(odd_values)
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(header, bytes(max(0, size + data.draw(st.sampled_from([0, 0, 0, 1, -1, 2]))))))
    check_agreement(path)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"{}",
        b" {}\n",
        b"{}\0",
        b"[]",
        b"\xef\xbb\xbf{}",
        b'{"\xff": 1}',
        b'{"__metadata__": {"\\ud800": "x"}}',
        b'{"__metadata__": {"\\ud83d\\ude00": "x"}}',
        b'{"__metadata__": {"a\nb": "x"}}',
        b'{"__metadata__": NaN}',
        b'{"__metadata__": {"a": 1}}',
        b'{"__metadata__": []}',
        b'{"__metadata__": null}',
        b'{"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [01], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1e0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [0, 9223372036854775808, 2], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [9223372036854775808, 2, 0], "data_offsets": [0, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 0], "x": 1e999}}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "x": 1' + b"0" * 400 + b"}}",
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "x": 1' + b"0" * 100 + b"}}",
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], "x": ' + b"[" * 10**5 + b"}}",
    ],
)
def test_corners_of_the_format(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(header))
    check_agreement(path)


@pytest.mark.parametrize("size", [0, 7, 8, 9, 100, 10**8, 10**8 + 1, 2**63, 2**64 - 1])
def test_announced_header_sizes(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + b"{}")
    check_agreement(path)


# --- layouts ----------------------------------------------------------------------------------------------


def test_single_file(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": tensors("a", "b"), "extra.safetensors": b"", "config.json": b"{}"})
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.unused == ("extra.safetensors",)
    assert checkpoint.files["model.safetensors"].path_real == (tmp_path / "model.safetensors").resolve()
    assert Checkpoint.open(str(tmp_path)).digest == checkpoint.digest


SHARDED = {shard("_1_2"): tensors("a", "b"), shard("_2_2"): tensors("c")}
INDEX = "model.safetensors.index.json"
SOUND_INDEX = index(_1_2=["a", "b"], _2_2=["c"])


@pytest.mark.parametrize(
    "extra", [{}, {INDEX: SOUND_INDEX}, {INDEX: SOUND_INDEX, "model.safetensors": tensors("a", "b", "c")}]
)
def test_shards(tmp_path: Path, extra: dict[str, bytes]) -> None:
    write(tmp_path, SHARDED | extra)
    checkpoint = Checkpoint.open(tmp_path)
    assert {name: info.file for name, info in checkpoint.tensors.items()} == {
        "a": shard("_1_2"),
        "b": shard("_1_2"),
        "c": shard("_2_2"),
    }


def test_hub_cache_links(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0a1b"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, content in (SHARDED | {INDEX: SOUND_INDEX, "config.json": b"{}"}).items():
        (blobs / f"sha-{name}").write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/sha-{name}")
    linked = Checkpoint.open(snapshot)
    name = shard("_1_2")
    assert linked.files[name].path_real == (blobs / f"sha-{name}").resolve()
    copied = tmp_path / "copy"
    copied.mkdir()
    write(copied, SHARDED | {"config.json": b"{}"})
    assert Checkpoint.open(copied).digest == linked.digest


def test_digest_tells_structures_apart(tmp_path: Path) -> None:
    versions = [
        {"model.safetensors": tensors("a")},
        {"model.safetensors": tensors("b")},
        {"model.safetensors": tensors("a"), "config.json": b"{}"},
        {"model.safetensors": tensors("a"), "config.json": b"{ }"},
        {shard("_1_1"): tensors("a")},
    ]
    digests = set()
    for i, files in enumerate(versions):
        (tmp_path / str(i)).mkdir()
        write(tmp_path / str(i), files)
        digests.add(Checkpoint.open(tmp_path / str(i)).digest)
    assert len(digests) == len(versions)


def test_a_large_checkpoint_opens_fast(tmp_path: Path) -> None:
    """6,513 tensors in 15 sparse files of 63 GB together: only headers are read."""
    shards = 15
    for number in range(shards):
        header, position = {}, 0
        for i in range(number, 6513, shards):
            header[f"backbone.layers.{i // 128}.mixer.experts.{i % 128}.up_proj.weight"] = (
                e := entry("BF16", [1856, 2600], position)
            )
            position = e["data_offsets"][1]
        raw = pack(header)
        with (tmp_path / shard(f"_{number + 1}_{shards}")).open("wb") as file:
            file.write(raw)
            file.truncate(len(raw) + position)
    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.tensors) == 6513
    assert sum(f.size for f in checkpoint.files.values()) > 62e9


# --- errors -----------------------------------------------------------------------------------------------

A = entry()
BAD_HEADERS: dict[str, bytes] = {
    "too small": b"\0\0",
    "not safetensors": b"PK\x03\x04" + bytes(100),
    "header beyond the end": (1000).to_bytes(8, "little") + b"{}",
    "header not JSON": pack(b"{'a': 1}"),
    "header not UTF-8": pack(b'{"\xff": 1}'),
    "header not an object": pack([1]),
    "tensor given twice": pack(
        b'{"a": %s, "a": %s}' % (json.dumps(A).encode(), json.dumps(A).encode()), b"\0\0"
    ),
    "metadata": pack({"__metadata__": {"a": 1}}),
    "entries": pack(
        {
            "no fields": {"dtype": "F32"},
            "dtype": A | {"dtype": "F7"},
            "negative": A | {"shape": [-1]},
            "fraction": A | {"shape": [1.0]},
            "offsets": A | {"data_offsets": [0]},
            "inverted": A | {"data_offsets": [2, 0]},
            "bytes": A | {"shape": [3, 5]},
            "overflow": A | {"shape": [2**40, 2**40]},
            "half a byte": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]},
        }
    ),
    "overlap": pack({"a": entry(begin=0, shape=[4]), "b": entry(begin=6)}, bytes(8)),
    "holes": pack({"a": entry(begin=2), "b": entry(begin=8)}, bytes(10)),
    "truncated": tensors("a", "b")[:-3],
    "trailing bytes": tensors("a", "b") + b"\0",
    "git-lfs pointer": POINTER,
}
Build = Callable[[Path], None]


def files(**contents: bytes) -> Build:
    return lambda directory: write(directory, {k if "." in k else shard(k): v for k, v in contents.items()})


def broken_link(directory: Path) -> None:
    write(directory, {INDEX: SOUND_INDEX, shard("_1_2"): tensors("a", "b")})
    (directory / shard("_2_2")).symlink_to("../../blobs/4f1e")


def file_instead(directory: Path) -> None:
    directory.rmdir()
    directory.write_bytes(b"")


def shard_is_a_directory(directory: Path) -> None:
    write(directory, {shard("_1_2"): tensors("a")})
    (directory / shard("_2_2")).mkdir()


BAD_DIRECTORIES: dict[str, Build] = {
    "no such directory": os.rmdir,
    "not a directory": file_instead,
    "empty": files(),
    "other formats": files(**{"pytorch_model.bin": b"", "model.gguf": b"", "config.json": b"{}"}),
    "other names": files(**{"adapter_model.safetensors": b""}),
    "numbered shards missing": files(_1_4=tensors("a"), _3_4=tensors("b")),
    "numbered shards of two sets": files(_1_2=tensors("a"), _2_2=tensors("b"), _1_3=tensors("c")),
    "numbered shards and a single file": files(_1_2=tensors("a"), **{"model.safetensors": tensors("a")}),
    "number beyond the set": files(_1_1=tensors("a"), _2_1=tensors("b")),
    "a directory": shard_is_a_directory,
    "tensor in two shards": files(
        _1_2=tensors("l.0.a", "l.1.a", "l.2.a"), _2_2=tensors("l.1.a", "l.2.a", "b")
    ),
    "broken link": broken_link,
    "index not JSON": files(_1_1=tensors("a"), **{INDEX: b"{"}),
    "index pointer": files(_1_1=POINTER, **{INDEX: POINTER}),
    "index without a map": files(_1_1=tensors("a"), **{INDEX: b'{"weight_map": [1]}'}),
    "index names a tensor twice": files(
        _1_1=tensors("a"), **{INDEX: b'{"weight_map": {"a": "x", "a": "y"}}'}
    ),
    "index leaves the directory": files(
        **{
            "good.safetensors": tensors("a"),
            INDEX: json.dumps(
                {
                    "weight_map": {
                        "a": "good.safetensors",
                        "b": "../b.safetensors",
                        "c": "/etc/c.safetensors",
                        "d": "sub\\d.safetensors",
                        "e": 3,
                        "f": "pytorch_model.bin",
                    }
                }
            ).encode(),
        }
    ),
    "index names a missing shard": files(_1_2=tensors("a"), **{INDEX: index(_1_2=["a"], _2_2=["b"])}),
    "index lies": files(
        _1_2=tensors("x.0.w", "x.1.w", "x.2.w", "y"),
        _2_2=tensors("z"),
        **{INDEX: index(_1_2=["x.0.w"], _2_2=["y", "z", "x.1.w", "x.2.w", "x.7.w"])},
    ),
    "single file and another index": files(
        **{"model.safetensors": tensors("a"), INDEX: SOUND_INDEX},
        **{"_1_2": tensors("a", "b"), "_2_2": tensors("c")},
    ),
    "several shards": files(_1_3=tensors("a")[:-1], _2_3=b"{}", _3_3=POINTER),
}
BAD = BAD_DIRECTORIES | {
    f"header: {name}": files(**{"model.safetensors": raw}) for name, raw in BAD_HEADERS.items()
}


@pytest.mark.parametrize("name", BAD)
def test_golden_errors(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    BAD[name](directory)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(directory)
    assert str(caught.value).replace(str(directory), "DIR") == golden("checkpoint_errors.txt")[name]
