# SPDX-License-Identifier: Apache-2.0
"""Texts to calibrate and to compare on: a file, or a data set that the ``datasets`` library opens.

A data set is named ``NAME[:SPLIT][,config=NAME][,column=NAME][,revision=NAME]``. NAME is that of a data set on the
Hugging Face hub, a directory of data files, or one file that holds a table. It is streamed: of a large one, no more is
fetched than is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_build.bundle import sha256_file
from nemo_build.errors import UserError
from nemo_build.export.quantize.calibration import read_texts

_TEXT_FILES = (".jsonl", ".txt")
_TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
"""Files that ``datasets`` reads as one table, and how; a ``.jsonl`` only where an option is given."""

_OPTIONS = ("config", "column", "revision")
_FAILURES = (OSError, ValueError, RuntimeError)
"""What ``datasets`` raises, besides errors of its own, for data sets that are missing, damaged or out of reach."""


@dataclass(frozen=True)
class Texts:
    """Texts and what they are.

    Attributes:
        name: As the user said it, or the file's name.
        dataset: What identifies the data set they come from; ``None`` for a text file.
        texts: The texts, read as they are used.
    """

    name: str
    dataset: Mapping[str, str | None] | None
    texts: Iterable[str]


@dataclass(frozen=True)
class _Dataset:
    """A data set as it was asked for."""

    name: str
    split: str = "train"
    config: str | None = None
    column: str = "text"
    revision: str | None = None


def open_texts(what: str) -> Texts:
    """Open a text file (JSON lines with ``text``, or plain text) or a data set.

    Raises:
        UserError: It is neither, or cannot be read. Texts that cannot be read are told when they are used.
    """
    path = Path(what)
    if path.suffix in _TEXT_FILES or (path.is_file() and path.suffix not in _TABLES):
        return Texts(path.name, None, read_texts(path))
    wanted = _parse(what)
    builder, rows = _open(wanted)
    file = Path(wanted.name)
    fingerprint = (
        sha256_file(file) if file.is_file() else builder.hash
    )  # which for one file is of its name only
    found = {"config": builder.config.name, "fingerprint": fingerprint}
    return Texts(what, {**asdict(wanted), **found}, _column(rows, wanted))


def _parse(what: str) -> _Dataset:
    """Read the name of a data set."""
    name, *pairs = what.split(",")
    split = {}
    if ":" in name and not Path(name).exists():
        name, _, split["split"] = name.rpartition(":")
    options = dict(pair.partition("=")[::2] for pair in pairs)
    wrong = [f"{key!r} is not one of {', '.join(_OPTIONS)}" for key in options if key not in _OPTIONS]
    values = {"NAME": name, **split, **options}
    wrong += [f"{key!r} has no value" for key, value in values.items() if not value]
    if wrong:
        hint = "A data set is named NAME[:SPLIT][,config=NAME][,column=NAME][,revision=NAME]."
        raise UserError(f"{what!r} does not name a text:", wrong, hint)
    return _Dataset(name, **split, **options)


def _open(wanted: _Dataset) -> tuple[Any, Iterable[Mapping[str, Any]]]:
    """The data set's builder and its rows."""
    try:
        import datasets
    except ImportError as error:
        hint = "pip install 'nemo-build[quantize]'"
        raise UserError(
            f"{wanted.name} is not a text file, and a data set needs: {error}", hint=hint
        ) from error
    table = _TABLES.get(Path(wanted.name).suffix) if Path(wanted.name).is_file() else None
    where = {"path": table, "data_files": wanted.name} if table else {"path": wanted.name}
    try:
        builder = datasets.load_dataset_builder(**where, name=wanted.config, revision=wanted.revision)
        return builder, builder.as_streaming_dataset(split=wanted.split)
    except (*_FAILURES, datasets.exceptions.DatasetsError) as error:
        headline = f"{wanted.name} is not a text file, and as a data set it cannot be opened:"
        raise UserError(headline, [str(error)]) from error


def _column(rows: Iterable[Mapping[str, Any]], wanted: _Dataset) -> Iterator[str]:
    """The texts in the rows."""
    from datasets.exceptions import DatasetsError

    try:
        for number, row in enumerate(rows, 1):
            text = row.get(wanted.column)
            if not isinstance(text, str):
                raise UserError(
                    f"Row {number} of the data set {wanted.name} has no text in a column {wanted.column!r}.",
                    [f"{name} is {type(value).__name__}" for name, value in row.items()],
                    "Say which column has the text: NAME,column=COLUMN.",
                )
            yield text
    except (*_FAILURES, DatasetsError) as error:
        raise UserError(f"The data set {wanted.name} cannot be read:", [str(error)]) from error
