# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_build.runtime.detokenizer import IncrementalDetokenizer


class Table:
    """A vocabulary made of the given byte strings; ids from 1000 on are control tokens ``<n>``."""

    special_ids = frozenset(range(1000, 1010))

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def token_bytes(self, token_id: int) -> bytes:
        return b"<%d>" % token_id if token_id >= 1000 else self.tokens[token_id]


def stream(tokens: list[bytes]) -> list[str]:
    """The pieces that a detokenizer shows for these tokens."""
    detokenizer = IncrementalDetokenizer(Table(tokens))
    return [detokenizer.push(i) for i in range(len(tokens))] + [detokenizer.finish()]


# Any bytes, and also bytes near the borders of UTF-8's rules, which random bytes seldom hit.
tricky = st.sampled_from([bytes([b]) for b in b"\xe2\x82\xac\xf0\x9f\x98\x80\xed\xa0\xc0a"])
pieces = st.lists(st.binary(max_size=4) | tricky | st.text(max_size=3).map(lambda t: t.encode()))


@given(pieces)
@example([b"\xe2\x82", b"A"])
@example([b"\xf0\x9f", b"\x98", b"\x80\xf0\x9f"])
@example([b"\xed", b"\xa0", b"\x80"])
def test_pieces_join_to_the_whole_decoded_at_once(tokens: list[bytes]) -> None:
    assert "".join(stream(tokens)) == b"".join(tokens).decode("utf-8", "replace")


@given(st.text(), st.data())
def test_valid_text_never_shows_a_replacement(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)))))
    tokens = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    shown = ""
    for piece in stream(tokens):
        shown += piece
        assert text.startswith(shown)
    assert shown == text


def test_each_character_is_shown_with_its_last_byte() -> None:
    assert stream([b"\xf0", b"\x9f", b"\x98", b"\x80", b"!"]) == ["", "", "", "😀", "!", ""]


def test_an_incomplete_end_becomes_one_replacement() -> None:
    assert stream([b"ok\xf0\x9f\x98"]) == ["ok", "\ufffd"]


@pytest.mark.parametrize(("skip", "expected"), [(True, "€"), (False, "\ufffd<1000>\ufffd")])
def test_control_tokens(skip: bool, expected: str) -> None:
    """A skipped token leaves no trace, even between the bytes of one character."""
    detokenizer = IncrementalDetokenizer(Table([b"\xe2\x82", b"\xac"]), skip_special_tokens=skip)
    assert "".join(detokenizer.push(i) for i in (0, 1000, 1)) + detokenizer.finish() == expected


def test_after_finish_a_new_text_starts() -> None:
    detokenizer = IncrementalDetokenizer(Table([b"\xe2", b"\x82\xac"]))
    assert detokenizer.push(0) + detokenizer.finish() == "\ufffd"
    assert detokenizer.push(0) + detokenizer.push(1) == "€"
