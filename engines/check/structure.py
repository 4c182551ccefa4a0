# SPDX-License-Identifier: Apache-2.0
"""The structure of an engine as plain data: what a later one is compared with to see what changed."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_build.engines.check.subject import Subject

_SECTIONS = {
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer",
    "special_tokens_map.json": "tokenizer",
    "chat_template.jinja": "template",
    "generation_config.json": "generation",
}
"""Which section a text file belongs to; the others are the model's configuration."""


def structure_of(subject: Subject) -> dict[str, dict[str, Any]]:
    """Values by section and name.

    Sections: ``tokenizer``, ``template``, ``generation`` and ``config`` (digests of files), ``options``, ``versions``,
    ``graphs`` (digests, and numbers of nodes), ``tensors`` (format, shape and digest of the contents).
    """
    manifest = subject.manifest
    found: dict[str, dict[str, Any]] = {
        "tokenizer": {},
        "template": {},
        "generation": {},
        "config": {},
        "options": dict(manifest["options"]),
        "versions": {
            "nemo_build": manifest["nemo_build"],
            **{f"backend {name}": _plain(value) for name, value in manifest["backend"].items()},
            **{f"kernels {name}": str(value)[:16] for name, value in manifest.get("kernels", {}).items()},
        },
        "graphs": {},
        "tensors": {},
    }
    for name, digest in manifest["files"].items():
        found[_SECTIONS.get(name, "config")][name] = digest[:16]
    for name, graph in manifest["graphs"].items():
        found["graphs"][name] = graph["sha256"][:16]
        found["graphs"] |= {f"{name} nodes": graph["nodes"]} if "nodes" in graph else {}
    found["tensors"] = dict(_tensors(subject.path, manifest))
    return found


def _tensors(directory: Path, manifest: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each tensor's format and shape, and a digest of its contents where the engine has these in a file of its own."""
    files = list(manifest["weights"]["files"])
    tensors = manifest["weights"]["tensors"]
    placed = len(files) == 1 and all("offset" in t for t in tensors.values())
    if not placed or not tensors:
        for name, tensor in tensors.items():
            yield name, _described(tensor)
        for name in files:
            yield name, str(manifest["weights"].get("sha256", {}).get(name, manifest["sizes"][name]))
        return
    with (
        open(directory / files[0], "rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory,
    ):
        for name, tensor in tensors.items():
            start = tensor["offset"]
            with memoryview(memory) as view, view[start : start + tensor["nbytes"]] as contents:
                digest = hashlib.blake2b(contents, digest_size=6).hexdigest()
            yield name, f"{_described(tensor)} {digest}"


def _described(tensor: Mapping[str, Any]) -> str:
    return f"{tensor.get('format', tensor['dtype'])} {list(tensor['shape'])}"


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float)) else str(value)
