# SPDX-License-Identifier: Apache-2.0
"""Bundles on disk: directories with a JSON manifest, published whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_build.errors import BundleError, UserError

MODEL_BUNDLE = "bundle.json"
"""Manifest of what ``export`` writes."""

ENGINE_BUNDLE = "engine.json"
"""Manifest of what ``build`` writes."""

FORMAT_VERSION = 1

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""Files that travel from the checkpoint through every bundle, where they exist."""

_CHUNK = 1 << 22

Progress = Callable[[int], None]
"""Called with the number of bytes (or steps) just done."""


@contextmanager
def publish(out: Path, *, force: bool = False) -> Iterator[Path]:
    """A temporary directory beside `out` that takes its name when the block ends without an exception.

    Args:
        out: The directory to write.
        force: Replace `out` if it exists.

    Raises:
        UserError: `out` exists and `force` is false, or its parent cannot be written.
    """
    if out.exists() and not force:
        raise UserError(f"{out} exists already.", hint="Remove it, choose another name, or pass --force.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise UserError(f"Cannot write {out}: {error.strerror}.") from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if out.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
            out.rename(old / out.name)
            temporary.rename(out)
            shutil.rmtree(old)
        else:
            temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_manifest(directory: Path, name: str, content: dict[str, Any]) -> None:
    """Write a manifest; keys keep their order, so equal contents are equal bytes."""
    data = {"format": name.removesuffix(".json"), "format_version": FORMAT_VERSION, **content}
    (directory / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_manifest(directory: Path, name: str) -> dict[str, Any]:
    """Read and check a bundle's manifest.

    Raises:
        BundleError: There is no such bundle, its manifest is damaged, or it is of another format version.
    """
    path = directory / name
    what = "an engine" if name == ENGINE_BUNDLE else "a model bundle"
    maker = "nemo-build build" if name == ENGINE_BUNDLE else "nemo-build export"
    if not path.is_file():
        raise BundleError(f"{directory} is not {what}: it has no {name}.", hint=f"Make one with `{maker}`.")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        found = data["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path} is damaged: {error!r}.", hint=f"Make it again with `{maker}`.") from error
    if found != FORMAT_VERSION:
        raise BundleError(
            f"{path} has format version {found}; this nemo-build reads version {FORMAT_VERSION}.",
            hint=f"Make it again with `{maker}`.",
        )
    return data  # type: ignore[no-any-return]


def copy_text_files(source: Path, destination: Path) -> dict[str, str]:
    """Copy the tokenizer, template and configuration files; returns name -> sha256 of those that exist."""
    digests = {}
    for name in TEXT_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
            digests[name] = sha256_file(destination / name)
    return digests


def check_files(directory: Path, files: dict[str, str]) -> None:
    """Check files against their sha256.

    Raises:
        BundleError: A file is missing or differs; all such files are named.
    """
    problems = []
    for name, digest in files.items():
        path = directory / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif sha256_file(path) != digest:
            problems.append(f"{name} is not the file that the manifest describes (sha256 differs)")
    if problems:
        raise BundleError(f"{directory} is damaged:", problems, "Make it again.")


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """Hex sha256 of a file's contents."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if progress:
                progress(len(chunk))
    return digest.hexdigest()


def sha256_json(value: object) -> str:
    """Hex sha256 of a JSON value in canonical form."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
