# SPDX-License-Identifier: Apache-2.0
"""Constraints by themselves: the end of a text, thinking and its budget, grammars behind it, and drafts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.errors import RequestError
from nemo_build.runtime import Grammar, SamplingParams, Thinking
from nemo_build.runtime.chat import AnswerParser
from nemo_build.runtime.constraints.base import Guide, allows
from nemo_build.runtime.constraints.making import Constraints
from nemo_build.runtime.constraints.thinking import MOST_BEGINNING
from nemo_build.runtime.tokenizer import Tokenizer

from .grammars import (
    CALL,
    CONSTRAINTS,
    EOS,
    GRAMMARS,
    OTHER,
    THINK_END,
    TOKENIZER,
    V,
    allowed,
    call,
    guide,
    run,
)

# --- the end -----------------------------------------------------------------------------------------------


def test_a_finished_grammar_allows_the_end_alone():
    stopping = guide("choice", '["no"]', stop_token_ids=(40,))
    assert not allowed(stopping) & {*EOS, 40}
    run(stopping, "no")
    assert allowed(stopping) == {*EOS, 40}
    assert not stopping.finished
    stopping.commit(11)
    assert stopping.finished
    assert allowed(stopping) == {*EOS, 40}


def test_a_token_of_the_text_that_ends_it():
    """It is part of the text where that allows it."""
    [zero] = TOKENIZER.encode("0")
    ending = guide("regex", "[0-9]+", stop_token_ids=(zero,))
    ending.commit(zero)
    assert not ending.finished
    assert zero in allowed(ending)


def test_ids_past_the_vocabulary_are_never_allowed():
    for kind in GRAMMARS:
        assert max(allowed(guide(kind))) < TOKENIZER.vocab_size


# --- thinking ----------------------------------------------------------------------------------------------


def thinking(budget: int, grace: int = 0, calls: tuple[str, ...] = ()) -> Guide:
    found = CONSTRAINTS.guide(SamplingParams(thinking=Thinking(budget, grace, calls)))
    assert found is not None
    return found


def forced_after(guide: Guide, text: list[int]) -> int | None:
    """After how many of these tokens the end of thinking is forced."""
    for i, token in enumerate([*text, 0]):
        if allowed(guide) == {THINK_END}:
            return i
        guide.commit(token)
    return None


WORD, LINE_END = TOKENIZER.encode("a")[0], TOKENIZER.encode("\n")[0]


@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_is_forced_exactly_at_the_budget(budget):
    guide = thinking(budget)
    assert forced_after(guide, [WORD] * 9) == budget
    guide.commit(THINK_END)
    assert guide.done


def test_grace_waits_for_the_end_of_a_line():
    assert forced_after(thinking(3, 4), [WORD] * 9) == 7
    assert forced_after(thinking(3, 4), [WORD] * 4 + [LINE_END] + [WORD] * 4) == 5
    assert forced_after(thinking(3, 4), [LINE_END, WORD, LINE_END] + [WORD] * 4) == 3, "it has just ended"
    assert forced_after(thinking(3, 4), [LINE_END] + [WORD] * 8) == 7, (
        "a line end before the budget does not count"
    )


def test_thinking_that_ends_by_itself_is_left_alone():
    for end in ([THINK_END], TOKENIZER.encode("</thi") + TOKENIZER.encode("nk>")):
        guide = thinking(8)
        for token in [WORD, *end]:
            assert len(allowed(guide)) == V
            guide.commit(token)
        assert guide.done


def force_of(text: str, budget: int, calls: tuple[str, ...]) -> tuple[str, int | None]:
    """Where a text ends the thinking by itself, and after how many tokens its end is forced."""
    guide, taken = thinking(budget, 0, calls), []
    for token in [*TOKENIZER.encode(text), *[WORD] * 60]:
        if guide.done or allowed(guide) == {THINK_END}:
            break
        guide.commit(token)
        taken.append(token)
    return TOKENIZER.decode(taken, skip_special_tokens=False), None if guide.done else len(taken)


CALLS = [
    "<tool_call>\n<function=get>",
    "a <tool_call> \n <function=get>",
    "<tool_call><tool_call>\n<function=now>",
    "<tool_call><function=go><function=x<tool_call><function=get>",
    'so <tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>',
]
NO_CALLS = [
    "<tool_call> is a mark",
    "<tool_call>\n<function=go>",
    "<tool_call>\n<function=get\n>",
    '<tool_call>{"name": "go"}</tool_call>',
    '<tool_call>{"name": "get", "arguments": 3}</tool_call>',
    '<tool_call>{"arguments": {}, "name": "get"}</tool_call>',
    "<tool_call>[1]</tool_call><function=get>",
    "<function=get>",
]


@pytest.mark.parametrize("text", [*CALLS, *NO_CALLS])
def test_thinking_is_what_the_reader_of_answers_takes_for_it(text):
    """A mark alone does not end it, nor a call where there is nothing to be called: the budget goes on."""
    tools = [{"function": {"name": "get"}}, {"function": {"name": "now"}}]
    parser = AnswerParser(thinking=True, tools=tools)
    parser.push(text)
    assert parser.has_tool_calls == (text in CALLS)
    length = len(TOKENIZER.encode(text))
    expected = None if text in CALLS else length + 2
    assert force_of(text, length + 2, ("get", "now"))[1] == expected
    assert force_of(text, length + 2, ())[1] == length + 2


def test_the_end_is_not_forced_into_the_beginning_of_a_call():
    call = CALLS[0]
    for budget in range(1, len(TOKENIZER.encode(call)) + 1):
        assert force_of(call, budget, ("get",)) == (call, None)
        assert force_of(call, budget, ())[1] == budget
    for text in ("<tool_call>" * 60, "<tool_call>" + "\n" * 90):
        assert force_of(text, 3, ("get",))[1] == 3 + MOST_BEGINNING, "it waits for so long only"
    assert force_of("<tool_call> or not", 1, ("get",))[1] == 2


class Spelling(Tokenizer):
    """A tokenizer that has no tokens for the marks of the chat format, but some that go beyond one."""

    def __init__(self) -> None:
        words = ["<", "/", "think", "tool", "_call", ">", ">{", "</", "{", "}", '"a"', ":", "1", " ", "</s>"]
        vocabulary = {w: i for i, w in enumerate(words)}
        backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
        backend.decoder = tokenizers.decoders.ByteLevel()
        super().__init__(backend, {"eos_token": "</s>"})
        self.words = words

    def encode(self, text, *, add_special_tokens=False):
        """Greedily; what there are no tokens for is left out."""
        found = []
        while text:
            word = max((w for w in self.words if text.startswith(w)), key=len, default="")
            found += [self.words.index(word)] if word else []
            text = text[len(word) or 1 :]
        return found


def test_an_end_of_several_tokens():
    tokenizer = Spelling()
    spelled = Constraints(tokenizer, 16, (14,))
    end = tokenizer.encode("</think>")
    assert len(end) == 3
    guide = spelled.guide(SamplingParams(thinking=Thinking(2)))
    for token in [13, 0, *end]:
        expected = {token} if token in end else set(range(16))
        masked = guide.masked(np.zeros(16, np.float32))
        assert set(np.flatnonzero(masked == 0).tolist()) == expected
        guide.commit(token)
    assert guide.done


def test_no_token_reaches_from_thinking_into_what_the_grammar_governs():
    tokenizer = Spelling()
    spelled = Constraints(tokenizer, 16, (14,))
    grammar = Grammar("json_object", "", after_thinking=True)
    guide = spelled.guide(SamplingParams(grammar=grammar))
    word = tokenizer.words.index
    for begun in ("</", "think"):
        assert allows(guide.mask(), word(">{"))
        guide.commit(word(begun))
    assert not allows(guide.mask(), word(">{"))
    assert allows(guide.mask(), word(">"))
    guide.commit(word(">"))
    assert np.flatnonzero(guide.masked(np.zeros(16, np.float32)) == 0).tolist() == [word("{")]
    other = spelled.guide(SamplingParams(grammar=grammar))
    for begun in ("<", "tool", "_call"):
        other.commit(word(begun))
    assert not allows(other.mask(), word(">")), "a call would end the thinking"


# --- grammars after thinking -------------------------------------------------------------------------------


def test_a_grammar_begins_right_behind_the_thinking():
    guide_ = guide("json_schema", after_thinking=True)
    free = allowed(guide_)
    assert free == set(range(V)) - {*EOS, CALL}, "the text may not end in thinking, nor a call begin"
    brace = TOKENIZER.encode("{")
    assert len(allowed(guide_, [WORD, THINK_END])) == 1
    assert brace[0] not in allowed(guide_, [WORD, THINK_END, *brace]), "no second brace"
    assert allowed(guide_) == free
    text = '</think>{"name": "x", "ages": []}'
    assert run(guide_, text) == (text, True)


def test_a_call_ends_thinking_where_the_grammar_has_calls():
    for text in (
        "hm" + call(name="now"),
        "hm</think>" + call(name="now"),
        "hm</think>I will." + call(name="now"),
    ):
        assert run(guide("tools", after_thinking=True), text) == (text, True)
    required = json.dumps({"tools": [OTHER], "choice": "required"})
    assert run(guide("tools", required, after_thinking=True), "a</think>b")[0] == "a</think>"


def test_a_budget_and_then_a_grammar():
    both = guide("choice", '["no"]', after_thinking=True, thinking={"budget": 2, "grace": 0})
    assert forced_after(both, [WORD] * 9) == 2
    both.commit(THINK_END)
    assert run(both, "no") == ("no", True)
    assert not both.done, "the end is still governed"


# --- drafts ------------------------------------------------------------------------------------------------

KINDS = [(kind, after) for kind in GRAMMARS for after in (False, True)]


def walk(guide: Guide, random, length: int, begin: list[int]) -> list[int]:
    """Tokens that may follow, each by the mask behind those before."""
    drafts: list[int] = []
    for _ in range(length):
        options = sorted(allowed(guide, [*begin, *drafts]))
        marks = [t for t in options if t in (THINK_END, CALL)]
        drafts.append(random.choice(marks if marks and random.random() < 0.3 else options))
    return drafts


@pytest.mark.parametrize(("kind", "after"), KINDS)
@given(random=st.randoms(use_true_random=False), length=st.integers(1, 15), kept=st.integers(0, 15))
def test_drafts_leave_no_trace(kind, after, random, length, kept):
    """Masks behind drafts are those of a guide that never saw others, however many of them come true."""
    params = {"thinking": Thinking(random.randrange(6), random.randrange(3))} if after else {}
    tried = guide(kind, after_thinking=after, **params)
    text: list[int] = []
    for _ in range(2):
        before = allowed(tried)
        drafts = walk(tried, random, length, [])
        if random.random() < 0.5:
            assert allowed(tried) == before
        for token in drafts[:kept]:
            tried.commit(token)
            text.append(token)
        fresh = guide(kind, after_thinking=after, **params)
        for token in text:
            fresh.commit(token)
        assert allowed(tried) == allowed(fresh)
        assert tried.finished == fresh.finished


def test_drafts_nobody_chose_are_corrected():
    choice = guide("choice", '["no", "nothing at all"]')
    no = TOKENIZER.encode("no")
    assert choice.corrected([*no, 500], 5)[: len(no)] == no
    assert 500 not in choice.corrected([*no, 500], 5)
    assert guide("choice", '["nothing at all"]').corrected([], 2), "forced ones need no drafts"
    assert len(guide("choice", '["nothing at all"]').corrected([], 2)) <= 2
    budget = thinking(2)
    assert budget.corrected([WORD] * 5, 4) == [WORD, WORD, THINK_END], "what follows is not known"
    assert thinking(9).corrected([WORD] * 5, 3) == [WORD] * 3


def test_a_draft_that_is_not_allowed_does_no_harm():
    """Unusable predictions of a drafter may give any token."""
    tried = guide("json_schema")
    before = allowed(tried)
    with pytest.raises(RequestError):
        tried.mask([5, 5])
    assert allowed(tried) == before
    both = guide("json_schema", after_thinking=True, thinking=Thinking(0))
    both.mask([WORD, WORD])
    assert allowed(both) == {THINK_END}
