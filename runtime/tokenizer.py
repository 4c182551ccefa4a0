# SPDX-License-Identifier: Apache-2.0
"""Byte-level BPE tokenizer of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from nemo_build.errors import BundleError, RequestError

__all__ = ["Tokenizer"]


def _byte_alphabet() -> dict[int, int]:
    """Code point to byte of GPT-2's printable alphabet (openai/gpt-2, ``bytes_to_unicode``).

    Printable bytes stand for themselves; the others are numbered from 256 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: byte for byte in printable} | {256 + n: byte for n, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _bytes_of_tokens(tokens: Sequence[str]) -> list[bytes]:
    """Map vocabulary strings back to bytes, all at once.

    A string with a character outside the alphabet stands for its own UTF-8 text, as in the ``tokenizers``
    library's decoder.
    """
    outside = 256
    lookup = np.full(max(_ALPHABET) + 2, outside, dtype=np.uint16)
    lookup[list(_ALPHABET)] = list(_ALPHABET.values())
    points = np.frombuffer("".join(tokens).encode("utf-32-le"), dtype="<u4")
    mapped = lookup[np.minimum(points, len(lookup) - 1)]
    buffer = mapped.astype(np.uint8).tobytes()
    ends = np.cumsum(np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens)))
    bounds = [0, *ends.tolist()]
    table = [buffer[bounds[i] : bounds[i + 1]] for i in range(len(tokens))]
    for i in np.unique(np.searchsorted(ends, np.flatnonzero(mapped == outside), side="right")).tolist():
        table[i] = tokens[i].encode()
    return table


def _component_types(component: Any) -> list[str]:
    """Types of a decoder (or another part of the pipeline), a sequence taken apart."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    if state["type"] != "Sequence":
        return [state["type"]]
    parts = next(value for value in state.values() if isinstance(value, list))
    return [part["type"] for part in parts]


def _token_text(entry: object) -> object:
    """A token in ``tokenizer_config.json`` is a string or an object with its ``content``."""
    return entry.get("content") if isinstance(entry, dict) else entry


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        bos_id: Id of the token that starts a text, or ``None``.
        eos_id: Id of the token that ends a text, or ``None``.
        pad_id: Id of the padding token, or ``None``.
        add_bos_token: Whether :meth:`encode` with special tokens puts the start token first; ``None`` leaves
            it to ``tokenizer.json``.
        added_ids: Ids of the tokens that stand beside the vocabulary of the text.
        special_ids: Ids of all control tokens, which are among those.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
        """Wrap a loaded tokenizer; :meth:`load` is the usual way.

        Raises:
            BundleError: The tokenizer is not byte-level, or ``config`` names a token it does not have.
        """
        problems = []
        decoders = _component_types(backend.decoder)
        if type(backend.model).__name__ != "BPE" or decoders not in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            problems.append(
                f"it is not byte-level BPE: model {type(backend.model).__name__}, "
                f"decoder {' + '.join(decoders) or 'none'}"
            )
        ids: dict[str, int | None] = {}
        for name in ("bos_token", "eos_token", "pad_token"):
            text = _token_text(config.get(name))
            ids[name] = backend.token_to_id(text) if isinstance(text, str) else None
            if text is not None and ids[name] is None:
                problems.append(f"{name} {text!r} of tokenizer_config.json is not in the vocabulary")
        add_bos = config.get("add_bos_token")
        if not (add_bos is None or isinstance(add_bos, bool)):
            problems.append(f"add_bos_token of tokenizer_config.json must be true or false, is {add_bos!r}")
        elif add_bos and config.get("bos_token") is None:
            problems.append("tokenizer_config.json sets add_bos_token but names no bos_token")
        if problems:
            raise BundleError("The tokenizer cannot be used.", problems)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_id, self.eos_id, self.pad_id = ids["bos_token"], ids["eos_token"], ids["pad_token"]
        self.add_bos_token = add_bos
        self._added = backend.get_added_tokens_decoder()
        self.added_ids = frozenset(self._added)
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Load ``tokenizer.json`` and, if there is one, ``tokenizer_config.json``.

        Raises:
            BundleError: A file is missing or damaged, or the tokenizer is not byte-level.
        """
        directory = Path(directory)
        problems = []
        path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
        backend: tokenizers.Tokenizer | None = None
        config: Any = {}
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            problems.append(f"{path} is missing")
        # The library reports a damaged file as a bare Exception.
        except Exception as error:
            problems.append(f"{path} is damaged: {error}")
        try:
            config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
            if not isinstance(config, dict):
                problems.append(f"{config_path} holds no JSON object")
        except (OSError, ValueError) as error:
            problems.append(f"{config_path} is damaged: {error}")
        if backend is None or problems:
            raise BundleError(f"Cannot load the tokenizer of {directory}.", problems)
        try:
            return cls(backend, config)
        except BundleError as error:
            raise BundleError(f"Cannot use the tokenizer of {directory}.", error.problems) from None

    @cached_property
    def _table(self) -> list[bytes]:
        """Bytes of every id; built at the first use, because encoding alone does not need it."""
        vocabulary = self._backend.get_vocab(with_added_tokens=False)
        size = 1 + max((*vocabulary.values(), *self._added), default=-1)
        table = [b""] * size
        for i, data in zip(vocabulary.values(), _bytes_of_tokens(list(vocabulary)), strict=True):
            table[i] = data
        for i, token in self._added.items():
            table[i] = token.content.encode()
        return table

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token, which tells of a text how many tokens it has at least."""
        return max(map(len, self._table), default=0)

    @property
    def vocab_size(self) -> int:
        """One more than the greatest id; a model's logits may be wider."""
        return len(self._table)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Text to ids. The text of a control token becomes that token, wherever it stands.

        Args:
            text: Any text.
            add_special_tokens: Put the start token first if :attr:`add_bos_token` says so; if it is ``None``,
                what ``tokenizer.json`` itself adds.

        Raises:
            RequestError: The text holds half a surrogate pair, so it has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            problem = f"character {error.start} is half a surrogate pair ({text[error.start]!a})"
            raise RequestError("The text is not valid Unicode.", [problem]) from None
        by_backend = add_special_tokens and self.add_bos_token is None
        ids: list[int] = self._backend.encode(text, add_special_tokens=by_backend).ids
        if add_special_tokens and self.add_bos_token and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """Ids to text; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: Token ids, >= 0.
            skip_special_tokens: Leave control tokens out.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; for an added token its text in UTF-8.

        An id without a token has none: a model's vocabulary may be padded beyond the tokenizer's.

        Raises:
            ValueError: The id is negative.
        """
        if token_id < 0:
            raise ValueError(f"token id {token_id} is negative")
        return self._table[token_id] if token_id < len(self._table) else b""
