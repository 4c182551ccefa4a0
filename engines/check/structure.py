# SPDX-License-Identifier: Apache-2.0
"""The structure of an engine as plain data: what a later one is compared with to see what changed."""

from __future__ import annotations

import hashlib
import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_build.plugins import native

if TYPE_CHECKING:
    import onnx

    from nemo_build.engines.check.subject import Subject

KERNELS = "kernels/"
"""Where engines keep machine code."""

_SECTIONS = {
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer",
    "special_tokens_map.json": "tokenizer",
    "chat_template.jinja": "template",
    "generation_config.json": "generation",
}
"""Which section a text file belongs to; the others are the model's configuration."""

_DIGITS = 12
"""Hexadecimal digits of a digest that are kept."""

_LIBRARIES = ("numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "tokenizers")
"""Packages whose versions results may depend on."""


def structure_of(subject: Subject) -> dict[str, dict[str, Any]]:
    """Values by section and name.

    Sections: ``tokenizer``, ``template``, ``generation`` and ``config`` (digests of files), ``spec`` (the model's sizes
    and numbers), ``options`` (of the build and of the graphs), ``versions`` (of what made the engine and of what runs
    it here), ``graphs`` (digests), ``attributes`` (all values that ops of one type have), ``wiring`` (a digest of the
    nodes of each layer), ``tensors`` (format, shape and digest of the contents).
    """
    manifest = subject.manifest
    found: dict[str, dict[str, Any]] = {
        name: {} for name in ("tokenizer", "template", "generation", "config", "options")
    }
    for name, digest in manifest["files"].items():
        if not name.startswith(KERNELS):
            found[_SECTIONS.get(name, "config")][name] = digest[:_DIGITS]
    found["options"] = {**manifest["options"], **{n: str(v) for n, v in manifest["graph_options"].items()}}
    found["spec"] = _flat(manifest["spec"])
    found["versions"] = _versions(manifest)
    found |= {"graphs": {}, "attributes": {}, "wiring": {}}
    found["graphs"] |= {n: d[:_DIGITS] for n, d in manifest["files"].items() if n.startswith(KERNELS)}
    for name, graph in manifest["graphs"].items():
        found["graphs"][name] = graph["sha256"][:_DIGITS]
        if str(graph["file"]).endswith(".onnx"):
            _describe(name, subject.path / graph["file"], found)
    found["tensors"] = dict(_tensors(subject.path, manifest))
    return found


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested data by dotted names."""
    found: dict[str, Any] = {}
    for name, entry in value.items():
        nested = isinstance(entry, Mapping)
        found |= _flat(entry, f"{prefix}{name}.") if nested else {f"{prefix}{name}": _plain(entry)}
    return found


def _versions(manifest: Mapping[str, Any]) -> dict[str, Any]:
    here = {}
    for name in _LIBRARIES:
        try:
            here[f"installed {name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "nemo_build": manifest["nemo_build"],
        **{f"backend {name}": _plain(value) for name, value in manifest["backend"].items()},
        **{f"kernels {name}": str(value)[:_DIGITS] for name, value in manifest.get("kernels", {}).items()},
        **here,
        "native kernels": "yes"
        if native.library() is not None
        else "no: the graphs' slow reference functions run",
    }


def _describe(graph: str, path: Path, found: dict[str, dict[str, Any]]) -> None:
    """Add an ONNX graph's attributes and wiring."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    constants = {i.name: _constant(i) for i in model.graph.initializer if not i.external_data}
    values: dict[str, set[str]] = defaultdict(set)
    digests: dict[str, Any] = defaultdict(lambda: hashlib.blake2b(digest_size=_DIGITS // 2))
    for node in model.graph.node:
        attributes = {a.name: _plain(onnx.helper.get_attribute_value(a)) for a in node.attribute}
        op = f"{node.domain}.{node.op_type}".lstrip(".")
        inputs = [constants.get(i, i) for i in node.input]
        layer = node.name.split("/")[0]
        digests[layer].update(repr((op, inputs, list(node.output), sorted(attributes.items()))).encode())
        for name, value in attributes.items():
            values[f"{graph}/{op}.{name}"].add(str(value))
    found["attributes"] |= {
        name: ", ".join(sorted(every))
        for name, every in values.items()
        if not name.endswith((".rows", ".columns"))
    }
    found["wiring"] |= {f"{graph}/{layer}": digest.hexdigest() for layer, digest in digests.items()}


def _constant(tensor: onnx.TensorProto) -> str:
    return hashlib.blake2b(tensor.SerializeToString(deterministic=True), digest_size=_DIGITS // 2).hexdigest()


def _tensors(directory: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each tensor's format and shape, and a digest of its contents where the engine has these in a file of its own."""
    files = list(manifest["weights"]["files"])
    tensors = manifest["weights"].get("tensors", {})
    placed = len(files) == 1 and all("offset" in t for t in tensors.values())
    if not placed or not tensors:
        for name, tensor in tensors.items():
            yield name, _described(tensor)
        for name, digest in manifest["weights"]["files"].items():
            yield name, str(digest)[:_DIGITS]
        return
    with (
        open(directory / files[0], "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
    ):
        for name, tensor in tensors.items():
            start = tensor["offset"]
            with memoryview(memory) as view, view[start : start + tensor["nbytes"]] as contents:
                digest = hashlib.blake2b(contents, digest_size=_DIGITS // 2).hexdigest()
            yield name, f"{_described(tensor)} {digest}"


def _described(tensor: Mapping[str, Any]) -> str:
    return f"{tensor.get('format', tensor['dtype'])} {list(tensor['shape'])}"


def form_of(tensor: str) -> str:
    """What a tensor's value says but for the digest of its contents: format and shape; empty if it says neither."""
    return tensor[: tensor.rfind("]") + 1]


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, (str, int, float)) else str(value)
