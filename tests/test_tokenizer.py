# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime.detokenizer import IncrementalDetokenizer
from nemo_build.runtime.tokenizer import Tokenizer

CONTROL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<unk>", "add_bos_token": False}
TEXTS = ["the cat sat on the mat", "Größe, naïve café, 10 €", "日本語のテキスト", "def f(x):\n    return x"]


def train() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS * 4, trainer)
    # Not a control token, and with characters that are also letters of the byte alphabet.
    backend.add_tokens(["<é Ġ>"])
    return backend


def write(directory: Path, backend: tokenizers.Tokenizer, config: dict[str, Any] | None = None) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tokenizer"), train(), CONFIG)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.load(directory)


def test_ids(tokenizer: Tokenizer) -> None:
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    assert tokenizer.special_ids == frozenset(range(5))
    assert tokenizer.vocab_size == train().get_vocab_size()


@given(text=st.text())
def test_text_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


@given(ids=st.lists(st.integers(0, 329)), skip=st.booleans())
def test_decode_as_the_library_and_as_a_stream(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    text = tokenizer.decode(ids, skip_special_tokens=skip)
    assert text == tokenizer._backend.decode(ids, skip_special_tokens=skip)
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    assert "".join(map(stream.push, ids)) + stream.finish() == text


def test_control_tokens_in_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>the cat<|im_end|>")
    assert (ids[0], ids[-1]) == (3, 4)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the cat"


def test_added_token_stands_for_its_own_text(tokenizer: Tokenizer) -> None:
    (token,) = tokenizer.encode("<é Ġ>")
    assert token not in tokenizer.special_ids
    assert tokenizer.token_bytes(token) == "<é Ġ>".encode()


def test_token_outside_the_byte_alphabet_stands_for_its_own_text() -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "日 é": 1, "Ġb": 2, "é": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {})
    assert [tokenizer.token_bytes(i) for i in range(4)] == [b"a", "日 é".encode(), b" b", b"\xe9"]
    assert tokenizer.decode([1], skip_special_tokens=False) == backend.decode([1])


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    singles = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([b]) for b in range(256)} <= singles
    # Bytes that no valid text holds, so that no round trip proves them, are letters of their own.
    for byte in (0xC0, 0xC1, *range(0xF5, 0x100)):
        token = tokenizer._backend.token_to_id(chr(byte))
        assert token is not None
        assert tokenizer.token_bytes(token) == bytes([byte])


def test_ids_without_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size + 5) == b""
    assert tokenizer.decode([tokenizer.vocab_size], skip_special_tokens=False) == ""
    with pytest.raises(ValueError, match="negative"):
        tokenizer.token_bytes(-1)


def test_text_without_a_utf8_form_is_the_users_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="character 2 is half a surrogate pair"):
        tokenizer.encode("ab\ud83d")


@pytest.mark.parametrize(
    ("add_bos", "by_file", "expected"),
    [(True, False, [1]), (True, True, [1]), (False, True, []), (None, True, [1]), (None, False, [])],
)
def test_start_token(tmp_path: Path, add_bos: bool | None, by_file: bool, expected: list[int]) -> None:
    backend = train()
    if by_file:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>"} | ({} if add_bos is None else {"add_bos_token": add_bos})
    tokenizer = Tokenizer.load(write(tmp_path, backend, config))
    plain = tokenizer.encode("the cat")
    assert 1 not in plain
    assert tokenizer.encode("the cat", add_special_tokens=True) == expected + plain


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = train()
    backend.enable_truncation(2)
    backend.enable_padding(length=64)
    assert len(Tokenizer.load(write(tmp_path, backend)).encode("some longer text")) not in (2, 64)


def test_same_ids_as_transformers(tokenizer: Tokenizer, directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    other = transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    for text in [*TEXTS, "<|im_start|>user\nhi<|im_end|>\n", ""]:
        assert tokenizer.encode(text) == other.encode(text, add_special_tokens=False)


# --- errors ------------------------------------------------------------------------------------------------


def problems(directory: Path) -> str:
    with pytest.raises(BundleError) as caught:
        Tokenizer.load(directory)
    return str(caught.value)


def test_missing_and_damaged_files_are_named_together(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    text = problems(tmp_path)
    assert "tokenizer.json is missing" in text
    assert "tokenizer_config.json is damaged" in text


@pytest.mark.parametrize("content", [b"{}", b"", b'{"version": "1.0", "model": ', b"\xff\xfe"])
def test_damaged_tokenizer(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert "tokenizer.json is damaged" in problems(tmp_path)


def test_config_that_is_no_object(tmp_path: Path) -> None:
    write(tmp_path, train())
    (tmp_path / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    assert "holds no JSON object" in problems(tmp_path)


def test_config_that_does_not_fit(tmp_path: Path) -> None:
    text = problems(write(tmp_path, train(), {"eos_token": "<gone>", "pad_token": 3, "add_bos_token": "yes"}))
    assert "eos_token '<gone>'" in text
    assert "pad_token 3" in text
    assert "add_bos_token" in text
    assert "names no bos_token" in problems(write(tmp_path, train(), {"add_bos_token": True}))


@pytest.mark.parametrize(
    ("model", "decoder", "named"),
    [
        (models.BPE(), decoders.Metaspace(), "BPE, decoder Metaspace"),
        (models.BPE(), None, "decoder none"),
        (models.WordPiece(unk_token="[UNK]"), decoders.WordPiece(), "WordPiece"),
        (models.BPE(), decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "ByteFallback + Fuse"),
    ],
)
def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path, model: Any, decoder: Any, named: str) -> None:
    backend = tokenizers.Tokenizer(model)
    if decoder is not None:
        backend.decoder = decoder
    text = problems(write(tmp_path, backend))
    assert "not byte-level BPE" in text
    assert named in text


# --- size --------------------------------------------------------------------------------------------------


def test_large_vocabulary() -> None:
    """131072 tokens, ids with holes."""
    rng = np.random.default_rng(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = rng.integers(0, 256, (131072, 8))
    tokens = dict.fromkeys(alphabet + ["".join(alphabet[i] for i in row) for row in letters.tolist()])
    vocabulary = {token: 3 * i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend, {})
    assert tokenizer.vocab_size == 3 * len(vocabulary) - 2
    single = {letter: tokenizer.token_bytes(vocabulary[letter]) for letter in alphabet}
    for token in list(tokens)[::50]:
        assert tokenizer.token_bytes(vocabulary[token]) == b"".join(single[letter] for letter in token)
    assert tokenizer.token_bytes(1) == b""
