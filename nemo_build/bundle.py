# SPDX-License-Identifier: Apache-2.0
"""Bundles on disk: directories with a JSON manifest, published whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_build.errors import BundleError, UserError

MODEL_BUNDLE = "bundle.json"
"""Manifest of what ``export`` writes."""

ENGINE_BUNDLE = "engine.json"
"""Manifest of what ``build`` writes."""

FORMAT_VERSION = 3

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "hf_quant_config.json",
)
"""Files that travel from the checkpoint through every bundle, where they exist."""

MORE_TEMPLATES = "additional_chat_templates"
"""Folder of named chat templates beside the default one."""

_REQUIRED = {
    MODEL_BUNDLE: ("checkpoint", "weights", "spec", "graphs", "files"),
    ENGINE_BUNDLE: ("target", "backend", "options", "spec", "graphs", "plan", "files", "sizes", "weights"),
}

_CHUNK = 1 << 22

Progress = Callable[[int], None]
"""Called with the number of bytes (or steps) just done."""


def is_bundle(directory: Path) -> bool:
    """Whether a directory holds a bundle of ours."""
    return any((directory / name).is_file() for name in (MODEL_BUNDLE, ENGINE_BUNDLE))


def require_output(out: Path, *, force: bool, source: Path, ours: Callable[[Path], bool] = is_bundle) -> None:
    """Check, before long work, that `out` may be written.

    Args:
        out: The directory to write.
        force: Whether `out` may be replaced. Only an empty directory, or one that is `ours`, ever is.
        source: The input, which must not be replaced.
        ours: Whether a directory is what the command writes.

    Raises:
        UserError: `out` exists and may not be replaced, or is or holds the input.
    """
    resolved, origin = out.resolve(), source.resolve()
    if resolved == origin or resolved in origin.parents:
        raise UserError(f"{out} is, or holds, the input {source}; it cannot be the output.")
    if not (out.exists() or out.is_symlink()):
        return
    if not force:
        raise UserError(f"{out} exists already.", hint="Remove it, choose another name, or pass --force.")
    if out.is_symlink() or not out.is_dir() or not (ours(out) or not any(out.iterdir())):
        raise UserError(
            f"{out} was not written by this command, nor is it empty; --force does not replace it."
        )


@contextmanager
def publish(out: Path) -> Iterator[Path]:
    """A temporary directory beside `out` that takes its name when the block ends without an exception.

    A directory of that name is replaced; :func:`require_output` guards what a user may replace.

    Raises:
        UserError: The parent of `out` cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise UserError(f"Cannot write {out}: {error.strerror}.") from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if out.exists():
            replace_directory(temporary, out)
        else:
            temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def replace_directory(new: Path, out: Path) -> None:
    """Put the directory `new` in the place of `out`; if that fails, `out` stays."""
    holder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", suffix=".old", dir=out.parent))
    old = holder / "replaced"
    try:
        out.rename(old)
        new.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    finally:
        shutil.rmtree(holder, ignore_errors=True)


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
    hint = f"Make it again with `{maker}`."
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = data["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise BundleError(f"{path} is damaged: {error!r}.", hint=hint) from error
    if found != FORMAT_VERSION:
        versions = f"format version {found}; this nemo-build reads version {FORMAT_VERSION}"
        raise BundleError(f"{path} has {versions}.", hint=hint)
    missing = [key for key in _REQUIRED[name] if key not in data]
    if missing:
        raise BundleError(f"{path} is damaged: it has no {', '.join(missing)}.", hint=hint)
    return data


def read_json(path: Path) -> Any:
    """A small JSON note of ours; ``None`` if it is missing or damaged, so that what it noted is done again."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: object) -> None:
    """Write a small JSON note whole or not at all."""
    publish_file(path, json.dumps(value))


def publish_file(path: Path, text: str) -> None:
    """Write a file whole or not at all; one of that name is replaced."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def text_files(directory: Path) -> list[str]:
    """Those of :data:`TEXT_FILES` that are there, and further chat templates."""
    found = [name for name in TEXT_FILES if (directory / name).is_file()]
    return found + sorted(str(p.relative_to(directory)) for p in directory.glob(f"{MORE_TEMPLATES}/*.jinja"))


def copy_files(source: Path, destination: Path, names: Iterable[str]) -> dict[str, str]:
    """Copy files; returns name -> sha256."""
    digests = {}
    for name in names:
        (destination / name).parent.mkdir(exist_ok=True)
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
