# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nemo_build.runtime.detokenizer import IncrementalDetokenizer
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.stopping import FinishReason, StepText, StopChecker, StopState


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    """What is shown after each piece and at the end, and the stop string found."""
    checker = StopChecker(stops, include_stop=include)
    shown = []
    for piece in pieces:
        emit, stopped = checker.push(piece)
        assert stopped == (checker.matched is not None)
        shown.append(emit)
    return [*shown, checker.finish()], checker.matched


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule, word by word: the first end of any stop string; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(bounds)]


small = st.text("ab\n", max_size=24)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


@given(small, stop_lists, st.lists(st.integers(0, 24)), st.booleans())
@example("aabaaab", ["aaab"], [1, 2, 3, 4, 5, 6], False)
@example("abab", ["b", "ab"], [1], False)
def test_any_cutting_gives_the_same(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    shown, matched = run(cut(text, cuts), stops, include)
    assert ("".join(shown), matched) == expected(text, stops, include)


def test_every_short_text_and_stop_string() -> None:
    stops = ["".join(stop) for n in range(1, 6) for stop in product("ab", repeat=n)]
    for text in map("".join, product("ab", repeat=8)):
        for stop in stops:
            shown, matched = run([text], [stop])
            assert ("".join(shown), matched) == expected_by_find(text, stop)


@given(small, stop_lists)
def test_as_little_as_possible_is_held_back(text: str, stops: list[str]) -> None:
    """What is not shown is the longest end of the text that begins a stop string."""
    checker = StopChecker(stops)
    shown = ""
    for n, char in enumerate(text, 1):
        emit, stopped = checker.push(char)
        if stopped:
            return
        shown += emit
        ends = [text[n - k : n] for k in range(n, 0, -1)]
        held = next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")
        assert shown + held == text[:n]


def test_stop_over_many_pieces() -> None:
    shown, matched = run(["one ", "<", "|", "en", "d|", "> two"], ["<|end|>"])
    assert (shown, matched) == (["one ", "", "", "", "", "", ""], "<|end|>")


def test_false_start_is_shown_as_soon_as_it_is_one() -> None:
    assert run(["a<|e", "x", "<|"], ["<|end|>"])[0] == ["a", "<|ex", "", "<|"]


def test_first_complete_wins_even_inside_a_longer_one() -> None:
    assert run(["xabcd"], ["abcd", "bc"]) == (["xa", ""], "bc")


def test_included_stop_is_not_held_back() -> None:
    assert run(["a<", "|>b"], ["<|>"], include=True) == (["a<", "|>", ""], "<|>")


def test_nothing_after_a_stop() -> None:
    checker = StopChecker(["."])
    assert checker.push("a.b") == ("a", True)
    assert checker.push("c") == ("", True)
    assert checker.finish() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopChecker(["a", ""])


@pytest.mark.parametrize("stop", ["a" * 20000 + "b", "ab" * 10000 + "a"])
def test_a_long_repetitive_stop_string_takes_linear_time(stop: str) -> None:
    text = stop[:-1] * 3
    shown, matched = run(cut(text, list(range(0, len(text), 4))), [stop])
    assert ("".join(shown), matched) == expected_by_find(text, stop)


def expected_by_find(text: str, stop: str) -> tuple[str, str | None]:
    place = text.find(stop)
    return (text, None) if place < 0 else (text[:place], stop)


# --- tokens ------------------------------------------------------------------------------------------------

EOS = 0


class Table:
    """Ids below 256 are bytes, except that 0 is the end token."""

    special_ids = frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        return b"</s>" if token_id == EOS else bytes([token_id])


def state(params: SamplingParams, *, skip_special_tokens: bool = True) -> StopState:
    return StopState(params, {EOS}, IncrementalDetokenizer(Table(), skip_special_tokens=skip_special_tokens))


def feed(tokens: bytes, params: SamplingParams) -> tuple[str, StepText, int]:
    """Text shown, the last step, and the number of tokens taken."""
    stopper, text = state(params), ""
    step = StepText("")
    for token in tokens:
        step = stopper.push(token)
        text += step.emit
        if step.finish_reason:
            break
    assert step.finish_reason == stopper.finish_reason
    return text, step, stopper.num_tokens


BASE = SamplingParams(max_tokens=8)


@pytest.mark.parametrize(
    ("params", "tokens", "text", "reason", "matched", "taken"),
    [
        (BASE, b"abc\0def", "abc", "stop", EOS, 4),
        (BASE, b"abcdefghij", "abcdefgh", "length", None, 8),
        (BASE, b"abcdefg\0", "abcdefg", "stop", EOS, 8),
        (replace(BASE, ignore_eos=True), b"abc\0defghi", "abcdefg", "length", None, 8),
        (replace(BASE, stop_token_ids=(ord("b"),)), b"abc", "a", "stop", ord("b"), 2),
        (replace(BASE, stop_token_ids=(ord("b"),), include_stop=True), b"abc", "ab", "stop", ord("b"), 2),
        (replace(BASE, stop_token_ids=(EOS,), ignore_eos=True), b"a\0b", "a", "stop", EOS, 2),
        (replace(BASE, stop=("cd",)), b"abcdef", "ab", "stop", "cd", 4),
        (replace(BASE, stop=("cd",), include_stop=True), b"abcdef", "abcd", "stop", "cd", 4),
        # The stop wins over the length reached at the same token.
        (replace(BASE, stop=("gh",)), b"abcdefghij", "abcdef", "stop", "gh", 8),
        # What is held back for a stop string that does not come is shown at the end.
        (replace(BASE, stop=("hx",)), b"abcdefghx", "abcdefgh", "length", None, 8),
        (replace(BASE, stop=("cx",)), b"abc\0", "abc", "stop", EOS, 4),
        # A character cut off by the end of the tokens.
        (BASE, b"a\xe2\x82\0", "a\ufffd", "stop", EOS, 4),
        (BASE, b"abcdefg\xe2\x82\xac", "abcdefg\ufffd", "length", None, 8),
        (replace(BASE, stop=("\ufffd",)), b"abcdefg\xe2", "abcdefg", "stop", "\ufffd", 8),
        # The first min_tokens tokens do not stop.
        (replace(BASE, min_tokens=3), b"a\0b\0c", "ab", "stop", EOS, 4),
        (replace(BASE, min_tokens=3, stop=("b",)), b"abcbx", "abc", "stop", "b", 4),
        (replace(BASE, min_tokens=3, stop=("bcd",)), b"abcdefghi", "abcdefgh", "length", None, 8),
        (replace(BASE, min_tokens=8, stop=("h",)), b"abcdefgh", "abcdefgh", "length", None, 8),
    ],
)  # fmt: skip
def test_end(
    params: SamplingParams, tokens: bytes, text: str, reason: str, matched: str | int | None, taken: int
) -> None:
    shown, step, num_tokens = feed(tokens, params)
    assert (shown, step.finish_reason, step.matched, num_tokens) == (text, reason, matched, taken)


def test_an_end_token_is_shown_only_if_the_request_names_it_and_special_tokens_are_shown() -> None:
    for named, skip, text in (((EOS,), True, ""), ((EOS,), False, "</s>"), ((1,), False, "")):
        params = replace(BASE, include_stop=True, stop_token_ids=named)
        stopper = state(params, skip_special_tokens=skip)
        assert stopper.push(EOS) == StepText(text, FinishReason.STOP, EOS)


def test_an_end_that_nothing_can_follow_ends_the_text_whatever_the_parameters_say() -> None:
    stopper = state(
        replace(BASE, ignore_eos=True, include_stop=True, min_tokens=5), skip_special_tokens=False
    )
    assert stopper.push(ord("a"), final=False).emit == "a"
    assert stopper.push(EOS, final=True) == StepText("", FinishReason.STOP, EOS)


def test_cancel_shows_what_was_held_back() -> None:
    stopper = state(replace(BASE, stop=("bcd",)))
    assert [stopper.push(t).emit for t in b"abc"] == ["a", "", ""]
    assert stopper.cancel() == StepText("bc", FinishReason.CANCELLED)


def test_nothing_is_taken_after_the_end() -> None:
    stopper = state(BASE)
    stopper.push(EOS)
    with pytest.raises(RuntimeError, match="after the end"):
        stopper.push(1)
    with pytest.raises(RuntimeError, match="after the end"):
        stopper.cancel()


@given(
    st.binary(max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
    st.integers(1, 12),
    st.integers(0, 12),
    st.booleans(),
)
def test_properties(tokens: bytes, stops: list[str], most: int, least: int, include: bool) -> None:
    params = SamplingParams(
        max_tokens=most, min_tokens=min(least, most), stop=tuple(stops), include_stop=include
    )
    text, step, taken = feed(tokens, params)
    assert taken <= most
    whole = bytes(t for t in tokens[:taken] if t != EOS).decode("utf-8", "replace")
    if step.finish_reason is FinishReason.STOP:
        assert taken > params.min_tokens
        assert whole.startswith(text)
    elif step.finish_reason is FinishReason.LENGTH:
        assert (taken, text) == (most, whole)
    else:
        assert taken == len(tokens)
        assert whole.startswith(text)
