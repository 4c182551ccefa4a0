# SPDX-License-Identifier: Apache-2.0
"""A read-only view of a checkpoint's safetensors files: which tensor lies where. No tensor data is read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nemo_build.errors import CheckpointError, UserError
from nemo_build.export.names import collapse
from nemo_build.export.safetensors_header import Header, HeaderError, TensorInfo, read_header, unique_object

__all__ = ["Checkpoint", "ShardInfo", "TensorInfo"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_NUMBERED = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".nemo", ".distcp", ".npz")
_HINT_DOWNLOAD = "Download the incomplete files again."
_HINT_POINTER = "Run `git lfs pull` in the repository to fetch the files that the pointers stand for."


@dataclass(frozen=True)
class ShardInfo:
    """One file: its name in the checkpoint, where its bytes really are, its size, its header's SHA-256."""

    name: str
    path_real: Path
    size: int
    header_digest: str


@dataclass(frozen=True)
class Checkpoint:
    """The tensors and files of a checkpoint directory.

    Attributes:
        directory: As given to :meth:`open`.
        tensors: By name; ordered by file, then by place in the file.
        files: By name in the checkpoint. A file may be a link, as in the Hugging Face cache.
        unused: Names of ``*.safetensors`` files in the directory that do not belong to the checkpoint.
        digest: SHA-256 over ``config.json`` and each file's name, size and header. It identifies the
            structure (names, dtypes, shapes, layout), not the values of the weights.
    """

    directory: Path
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, ShardInfo]
    digest: str
    unused: tuple[str, ...] = ()

    def folder(self) -> Path:
        """The directory in which all shards really are.

        Raises:
            UserError: They are in several.
        """
        folders = sorted({str(shard.path_real.parent) for shard in self.files.values()})
        if len(folders) > 1:
            raise UserError(
                "The checkpoint's shards cannot be referenced: they lie in several directories.",
                folders,
                "Put them into one directory; hard links will do.",
            )
        return Path(folders[0])

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> Checkpoint:
        """Read and check all headers.

        Accepts ``model.safetensors``, an index with its shards, and numbered shards without an index.
        Raises CheckpointError that lists every structural problem of every file.
        """
        return _Opening(Path(directory)).run()


@dataclass
class _Opening:
    """The state of one :meth:`Checkpoint.open`."""

    directory: Path
    problems: list[str] = field(default_factory=list)
    hints: dict[str, None] = field(default_factory=dict)
    headers: dict[str, Header] = field(default_factory=dict)

    def run(self) -> Checkpoint:
        listing = self._list()
        weight_map = self._read_index() if INDEX in listing else None
        names = self._shard_names(listing, weight_map)
        for name in names:
            self._read_shard(name)
        tensors = self._merge()
        if weight_map is not None:
            self._check_index(weight_map)
        if self.problems:
            headline = f"{self.directory}: the checkpoint is damaged or incomplete"
            raise CheckpointError(headline, self.problems, " ".join(self.hints))
        files = {
            name: ShardInfo(name, Path(os.path.realpath(self.directory / name)), header.size, header.digest)
            for name, header in self.headers.items()
        }
        unused = tuple(n for n in listing if n.endswith(".safetensors") and n not in files)
        return Checkpoint(self.directory, tensors, files, self._digest(files), unused)

    def _list(self) -> list[str]:
        try:
            return sorted(os.listdir(self.directory))
        except FileNotFoundError:
            raise CheckpointError(f"{self.directory}: no such directory") from None
        except NotADirectoryError:
            hint = "Give the directory that holds config.json and the *.safetensors files."
            raise CheckpointError(f"{self.directory}: not a directory", hint=hint) from None
        except OSError as error:
            raise CheckpointError(f"{self.directory}: {error.strerror}") from None

    def _read_index(self) -> dict[str, str]:
        """The index's map from tensor to file; parts that cannot be used are noted and left out."""
        path = self.directory / INDEX
        try:
            raw = path.read_bytes()
            if raw.startswith(b"version https://git-lfs"):
                raise HeaderError("a git-lfs pointer, not the file itself", pointer=True)
            index = json.loads(raw.decode("utf-8"), object_pairs_hook=unique_object)
        except (HeaderError, OSError, ValueError, RecursionError) as error:
            self._note_unreadable(INDEX, error)
            return {}
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            self.problems.append(f"{INDEX}: no weight_map object that names the tensors' files")
            return {}
        bad = {file if isinstance(file, str) else json.dumps(file) for file in weight_map.values()}
        bad = {file for file in bad if not _is_plain_name(file)}
        for file in sorted(bad):
            self.problems.append(f"{INDEX}: {file!r} is not the name of a *.safetensors file")
        return {n: f for n, f in weight_map.items() if isinstance(f, str) and _is_plain_name(f)}

    def _shard_names(self, listing: list[str], weight_map: Mapping[str, str] | None) -> list[str]:
        """Which files make up the checkpoint; raises CheckpointError if there are none."""
        numbered = [m for m in map(_NUMBERED.fullmatch, listing) if m]
        if weight_map is not None:
            names = sorted(set(weight_map.values()))
            if SINGLE in listing and SINGLE not in names:
                self._check_single(names)
            return names
        if SINGLE in listing:
            if numbered:
                others = f"{len(numbered)} numbered shards without an index"
                self.problems.append(f"{SINGLE} and {others}: which is meant?")
            return [SINGLE]
        if not numbered:
            self._raise_without_weights(listing)
        totals = sorted({int(m[2]) for m in numbered})
        if len(totals) > 1:
            self.problems.append(f"shards of different sets: -of- {', '.join(map(str, totals))}")
            return [m[0] for m in numbered]
        wanted = [f"model-{i:05}-of-{totals[0]:05}.safetensors" for i in range(1, totals[0] + 1)]
        for name in sorted({m[0] for m in numbered} - set(wanted)):
            self.problems.append(f"{name}: its number is not in the set of {totals[0]}")
        return wanted

    def _check_single(self, names: list[str]) -> None:
        """A single file beside an index is tolerated only if it describes the very same tensors."""

        def table(headers: Iterable[Header]) -> dict[str, tuple[str, tuple[int, ...]]]:
            return {t.name: (t.dtype, t.shape) for header in headers for t in header.tensors}

        try:
            single = table([read_header(self.directory / SINGLE, SINGLE)])
            shards = table(read_header(self.directory / name, name) for name in names)
        except (HeaderError, OSError):
            single, shards = {"": ("", ())}, {}
        if single != shards:
            self.problems.append(f"{SINGLE} and {INDEX} describe different tensors: which is meant?")

    def _raise_without_weights(self, listing: list[str]) -> None:
        found = [n for n in listing if n.endswith((*OTHER_FORMATS, ".safetensors"))]
        wanted = f"{SINGLE}, {INDEX} or model-00001-of-0000N.safetensors"
        if not found:
            raise CheckpointError(f"{self.directory}: no weights", hint=f"Expected {wanted}.")
        hint = f"Expected {wanted}."
        if not any(n.endswith(".safetensors") for n in found):
            hint = "Only safetensors is read: it needs no code to be run. Save or convert the model to it."
        shown = [f"found {text}" for text in found[:10]] + (["..."] if len(found) > 10 else [])
        raise CheckpointError(f"{self.directory}: no weights in safetensors format", shown, hint)

    def _read_shard(self, name: str) -> None:
        path = self.directory / name
        try:
            self.headers[name] = read_header(path, name)
        except (HeaderError, OSError) as error:
            self._note_unreadable(name, error)

    def _note_unreadable(self, name: str, error: Exception) -> None:
        path = self.directory / name
        if isinstance(error, HeaderError):
            self.problems += [f"{name}: {problem}" for problem in error.problems]
            if error.pointer:
                self.hints[_HINT_POINTER] = None
            elif any(p.startswith("truncated") for p in error.problems):
                self.hints[_HINT_DOWNLOAD] = None
        elif isinstance(error, FileNotFoundError):
            link = f": broken link to {os.readlink(path)}" if path.is_symlink() else ": missing"
            self.problems.append(name + link)
            self.hints[_HINT_DOWNLOAD] = None
        elif isinstance(error, OSError):
            self.problems.append(f"{name}: {error.strerror}")
        else:
            detail = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            self.problems.append(f"{name}: not JSON: {detail}")

    def _merge(self) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        twice: dict[tuple[str, str], list[str]] = {}
        for header in self.headers.values():
            for tensor in header.tensors:
                first = tensors.setdefault(tensor.name, tensor)
                if first is not tensor:
                    twice.setdefault((first.file, tensor.file), []).append(tensor.name)
        for (one, other), names in twice.items():
            self.problems += [f"{text}: both in {one} and in {other}" for text in _lines(names)]
        return tensors

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        """The index against the shards that could be read."""
        held = {name: {t.name for t in header.tensors} for name, header in self.headers.items()}
        mapped: dict[str, set[str]] = {name: set() for name in held}
        for tensor, file in weight_map.items():
            mapped.get(file, set()).add(tensor)
        for file, names in held.items():
            for text in _lines(mapped[file] - names):
                self.problems.append(f"{file}: lacks {text}, which {INDEX} places there")
            for text in _lines(names - mapped[file]):
                self.problems.append(f"{file}: holds {text}, which {INDEX} does not place there")

    def _digest(self, files: Mapping[str, ShardInfo]) -> str:
        try:
            config = hashlib.sha256((self.directory / "config.json").read_bytes()).hexdigest()
        except OSError:
            config = "none"  # reading the configuration reports this
        lines = [f"config.json {config}"]
        lines += [f"{json.dumps(f.name)} {f.size} {f.header_digest}" for _, f in sorted(files.items())]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _is_plain_name(file: str) -> bool:
    """Whether `file` names a safetensors file in the directory itself, never one elsewhere."""
    return file.endswith(".safetensors") and not re.search(r"[/\\\0]", file)


def _lines(names: Iterable[str]) -> list[str]:
    return [text if count == 1 else f"{text} ({count} tensors)" for text, count in collapse(names)]
