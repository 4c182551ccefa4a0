# SPDX-License-Identifier: Apache-2.0
"""Grammars and thinking budgets in the demo engine: what comes out obeys them, and drafts do not change it."""

from __future__ import annotations

import json
import re
from functools import cache

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_build.demo import CHECKPOINT
from nemo_build.errors import RequestError
from nemo_build.runtime import Engine, FinishReason, Grammar, SamplingParams, Scheduling, Thinking
from nemo_build.runtime.constraints.base import allows
from nemo_build.runtime.constraints.grammar import GrammarConstraint
from nemo_build.runtime.constraints.making import Constraints
from nemo_build.runtime.constraints.thinking import MOST_BEGINNING
from nemo_build.runtime.request import Request
from nemo_build.runtime.sampling import TokenCounts, target_distribution
from nemo_build.runtime.server.backend import EngineBackend
from nemo_build.runtime.speculation.drafting import chooser_for
from nemo_build.runtime.speculation.verify import verify
from nemo_build.runtime.tokenizer import Tokenizer

from .serving import served

SPECULATORS = ("mtp", "dflash", "dspark", "ngram")
PROMPTS = ["The list type <think>", "def add(x):\n<think>\n", "import json", "x"]
THINK_END, CALL = 13, 14

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["small", "large"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
    },
    "required": ["name", "kind", "counts"],
    "additionalProperties": False,
}
TOOLS = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "get",
                "parameters": {
                    "type": "object",
                    "properties": {"n": {"type": "integer", "maximum": 99}, "unit": {"enum": ["c", "f"]}},
                    "required": ["n", "unit"],
                },
            },
        }
    ],
    "choice": "required",
    "parallel": False,
}


@pytest.fixture(scope="module")
def engine(demo_engine_directory):
    """Opens the demo engine with a speculator, once."""

    @cache
    def load(speculate: str, draft_length: int = 3, drafting: str = "coupled") -> Engine:
        length = None if speculate == "none" else draft_length
        return Engine.load(
            demo_engine_directory,
            max_sequences=4,
            speculate=speculate,
            draft_length=length,
            drafting=drafting,
        )

    return load


def results(engine: Engine, prompts: list[str], params: list[SamplingParams]) -> list[tuple]:
    found = engine.generate(prompts, params, skip_special_tokens=False)
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in found]


def params_of(grammar: Grammar | None, temperature: float, **more) -> SamplingParams:
    return SamplingParams(
        **{"max_tokens": 60, "temperature": temperature, "seed": 5, "grammar": grammar} | more
    )


MIXED = [
    params_of(grammar, temperature, **more)
    for temperature in (0.0, 1.0)
    for grammar, more in [
        (Grammar("json_schema", json.dumps(PERSON)), {}),
        (Grammar("json_schema", json.dumps(PERSON), after_thinking=True), {"thinking": Thinking(9, 4)}),
        (Grammar("tools", json.dumps(TOOLS), after_thinking=True), {"thinking": Thinking(3)}),
        (Grammar("tools", json.dumps(TOOLS | {"choice": "auto"})), {"frequency_penalty": 0.5}),
        (Grammar("choice", '["yes", "maybe so"]'), {"logit_bias": {40: 100.0}, "min_tokens": 3}),
        (Grammar("regex", "[a-z]{3,5}-[0-9]{2,30}"), {"repetition_penalty": 1.3, "logprobs": 2}),
        (None, {"thinking": Thinking(7)}),
        (None, {}),
    ]
]
"""Requests of all kinds, which run beside each other."""


@pytest.mark.parametrize("speculate", SPECULATORS)
def test_texts_are_those_without_drafts(engine, speculate):
    prompts = [PROMPTS[i % 2] for i in range(len(MIXED))]
    plain = results(engine("none"), prompts, MIXED)
    drafting = engine(speculate)
    assert results(drafting, prompts, MIXED) == plain
    assert sum(drafting.acceptance.accepted) > 0
    for found, params in zip(plain, MIXED, strict=True):
        if found[2] is FinishReason.STOP and params.grammar is not None:
            check(found[1], params.grammar)


def check(text: str, grammar: Grammar) -> None:
    """A whole text obeys its grammar."""
    if grammar.after_thinking:
        _, end, text = text.partition("</think>")
        assert end
    if grammar.kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(grammar.text))
    elif grammar.kind == "choice":
        assert text in json.loads(grammar.text)
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text)
    else:
        parameters = r"<parameter=n>\n-?\d+\n</parameter>\n<parameter=unit>\n[cf]\n</parameter>\n"
        call = rf"<tool_call>\n<function=get>\n{parameters}</function>\n</tool_call>\n?"
        assert re.fullmatch(rf"(\n*{call}|(?!.*<tool_call>).*|.*{call})", text, re.DOTALL), text


@pytest.mark.parametrize("length", [1, 2, 5, pytest.param(9, marks=pytest.mark.slow), 15])
@pytest.mark.parametrize("speculate", ["mtp", "ngram"])
def test_drafts_of_any_length(engine, speculate, length):
    prompts, params = PROMPTS[:2] * 4, MIXED[:8]
    assert results(engine(speculate, length), prompts, params) == results(engine("none"), prompts, params)


@pytest.mark.slow
@pytest.mark.parametrize("length", range(1, 16))
@pytest.mark.parametrize("speculate", SPECULATORS)
def test_drafts_of_each_length(engine, speculate, length):
    prompts = [PROMPTS[i % 4] for i in range(len(MIXED))]
    assert results(engine(speculate, length), prompts, MIXED) == results(engine("none"), prompts, MIXED)


# --- thinking ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("speculate", ["none", *SPECULATORS])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_budget_is_never_exceeded(engine, speculate, temperature):
    budgets = [0, 1, 6, 17]
    params = [params_of(None, temperature, thinking=Thinking(b), max_tokens=30) for b in budgets]
    for prompt in PROMPTS[:2]:
        found = engine(speculate).generate([prompt] * 4, params)
        for budget, completion in zip(budgets, found, strict=True):
            tokens = completion.token_ids
            ends = [t in (THINK_END, 2, 11) for t in tokens]
            assert ends.index(True) <= budget
            if ends.index(True) == budget:
                assert tokens[budget] == THINK_END


@pytest.mark.parametrize("speculate", ["none", *SPECULATORS])
def test_marks_of_calls_do_not_use_up_the_budget(engine, speculate):
    biased = {"logit_bias": {CALL: 100.0}, "max_tokens": 60}
    for calls, waits in ((), 0), (("get",), MOST_BEGINNING):
        params = params_of(None, 0.0, thinking=Thinking(4, calls=calls), **biased)
        [found] = engine(speculate).generate(PROMPTS[:1], params)
        assert found.token_ids[: 4 + waits + 1] == (CALL,) * (4 + waits) + (THINK_END,)


def test_the_server_tells_of_the_functions_that_may_be_called(engine):
    ask = {
        "messages": [{"role": "user", "content": "hello"}],
        "logit_bias": {str(CALL): 100},
        "max_tokens": 60,
    }
    with served(EngineBackend(engine("none"), speculate="none")) as server:
        for more, waits in ({}, 0), ({"tools": TOOLS["tools"]}, MOST_BEGINNING):
            answer = server.post("/v1/chat/completions", **ask, **more, thinking_budget=4)
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4 + waits + 1


def test_the_end_and_the_first_token_behind_it_come_in_one_run_of_drafts(engine):
    """Both are drafts of one step, and neither is lost or doubled."""
    params = params_of(Grammar("json_schema", json.dumps(PERSON), True), 0.0, thinking=Thinking(4))
    runs = []
    for speculate in ("mtp", "dspark"):
        chunks = list(engine(speculate, 7).stream(PROMPTS[0], params, skip_special_tokens=False))
        tokens = [c.token_id for c in chunks]
        end = tokens.index(THINK_END)
        runs.append(chunks[end].drafted and chunks[end + 1].drafted)
        assert "".join(c.text for c in chunks[end + 1 :]).startswith('{"')
    assert any(runs)


# --- any schema --------------------------------------------------------------------------------------------

_LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -5, "maximum": 12},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"enum": ["red", 2, None]},
        {"const": {"x": [1]}},
    ]
)


def _larger(inner):
    names = st.lists(st.sampled_from(["a", "b", "name", "é"]), min_size=1, max_size=3, unique=True)

    @st.composite
    def objects(draw):
        properties = {name: draw(inner) for name in draw(names)}
        required = [name for name in properties if draw(st.booleans())]
        return {
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }

    return (
        objects()
        | st.builds(lambda i: {"type": "array", "items": i, "minItems": 1, "maxItems": 2}, inner)
        | st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner)
    )


SCHEMAS = st.recursive(_LEAVES, _larger, max_leaves=5)


def check_schema(engine, schema, speculate: str, temperature: float, seed: int) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    params = [params_of(grammar, temperature, seed=seed + i, max_tokens=100) for i in range(2)]
    plain = results(engine("none"), PROMPTS[2:], params)
    for _, text, reason, _ in plain:
        if reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text), schema)
    assert results(engine(speculate), PROMPTS[2:], params) == plain


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schema=SCHEMAS,
    speculate=st.sampled_from(SPECULATORS),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_schema_gives_json_of_it(engine, schema, speculate, temperature, seed):
    check_schema(engine, schema, speculate, temperature, seed)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    schema=SCHEMAS,
    speculate=st.sampled_from(SPECULATORS),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 99),
)
def test_many_schemas_give_json_of_them(engine, schema, speculate, temperature, seed):
    check_schema(engine, schema, speculate, temperature, seed)


@pytest.mark.parametrize("drafting", ["token", "block"])
@pytest.mark.parametrize("speculate", ["mtp", "dspark"])
def test_rejection_sampling_keeps_to_the_grammar(engine, speculate, drafting):
    drafting_engine = engine(speculate, 3, drafting)
    grammar = Grammar("json_schema", json.dumps(PERSON), after_thinking=True)
    params = [params_of(grammar, 1.0, seed=s, thinking=Thinking(3), max_tokens=100) for s in range(12)]
    found = drafting_engine.generate(PROMPTS[:1] * 12, params, skip_special_tokens=False)
    assert sum(drafting_engine.acceptance.accepted) > 0
    finished = [c for c in found if c.finish_reason is FinishReason.STOP]
    assert len(finished) > 3
    for completion in finished:
        check(completion.text, grammar)


# --- one step ----------------------------------------------------------------------------------------------

TOKENIZER_V = 3072


@pytest.fixture(scope="module")
def constraints():
    return Constraints(Tokenizer.load(CHECKPOINT), TOKENIZER_V, (2, 11))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**31),
    length=st.integers(1, 15),
    method=st.sampled_from(["coupled", "token", "block"]),
    temperature=st.sampled_from([0.0, 0.7, 2.0]),
    penalty=st.sampled_from([1.0, 1.5]),
)
def test_a_step_gives_allowed_tokens_alone(constraints, seed, length, method, temperature, penalty):
    """Whatever target and drafter predict, with biases and penalties against the grammar."""
    rng = np.random.default_rng(seed)
    grammar = Grammar("json_schema", json.dumps(PERSON), after_thinking=bool(seed % 2))
    params = SamplingParams(
        temperature=temperature,
        logit_bias={5: 100.0, 2: 100.0, 11: 50.0},
        repetition_penalty=penalty,
        grammar=grammar,
        thinking=Thinking(2) if grammar.after_thinking else None,
    )
    guide, fresh = constraints.guide(params), constraints.guide(params)
    logits = rng.normal(size=(length + 1, TOKENIZER_V), scale=4).astype(np.float32)
    keys = {"seed": seed, "position": 3, "eos_ids": (2, 11), "num_output": 0}
    counts = TokenCounts([1, 2, 3])
    chooser = chooser_for(params, counts, **keys, method=method, guide=guide)
    noise = rng.normal(size=(length, TOKENIZER_V), scale=1).astype(np.float32)
    drafts = [chooser(logits[i] + noise[i]) for i in range(length)]
    probabilities = getattr(chooser, "probabilities", None)
    verdict = verify(
        logits,
        drafts,
        params,
        counts,
        **keys,
        probabilities=probabilities,
        method="block" if method == "block" else "token",
        guide=guide,
    )
    for token in verdict.tokens:
        assert allows(fresh.mask(), token)
        fresh.commit(token)
    for draft in drafts[: verdict.accepted]:
        guide.commit(draft)
    for token in verdict.tokens[verdict.accepted :]:
        guide.commit(token)
    np.testing.assert_array_equal(guide.mask(), fresh.mask())


def test_the_distribution_is_that_of_the_allowed_tokens(constraints):
    params = SamplingParams(grammar=Grammar("choice", '["yes", "no"]'), temperature=1.3, top_k=2)
    guide = constraints.guide(params)
    logits = np.random.default_rng(0).normal(size=TOKENIZER_V).astype(np.float32)
    probs = target_distribution(guide.masked(logits), params, None, eos_ids=(2, 11), num_output=0)
    assert 0 < np.count_nonzero(probs) <= 2
    assert all(allows(guide.mask(), t) for t in np.flatnonzero(probs))


# --- requests ----------------------------------------------------------------------------------------------


def test_a_finished_grammar_ends_the_text_before_min_tokens(engine):
    params = params_of(Grammar("choice", '["yes"]'), 0.0, min_tokens=20)
    [found] = engine("none").generate("x", params, skip_special_tokens=False)
    assert (found.text, found.finish_reason) == ("yes", FinishReason.STOP)


def test_a_finished_grammar_ends_the_text_whatever_ends_it(engine):
    """The model's own end is never part of the text, whether it ends texts otherwise or is shown."""
    given = {"ignore_eos": True, "include_stop": True, "stop_token_ids": (40,)}
    for speculate in ("none", "mtp"):
        params = params_of(Grammar("choice", '["yes"]'), 0.0, logit_bias={2: 100.0}, **given)
        [found] = engine(speculate).generate("x", params, skip_special_tokens=False)
        assert (found.text, found.finish_reason) == ("yes", FinishReason.STOP)


def test_a_grammar_that_is_refused_runs_nothing(engine):
    plain = engine("none")
    steps = plain.statistics().steps
    bad = params_of(Grammar("json_schema", '{"not": {}}'), 0.0)
    with pytest.raises(RequestError, match="not"):
        plain.generate(["a", "b"], [params_of(None, 0.0), bad])
    assert plain.statistics().steps == steps


def test_a_grammar_that_turns_out_too_complex_ends_its_request_alone(engine, monkeypatch):
    """The library finds some limits out on the way."""
    plain = engine("none")
    inner, asked = GrammarConstraint.mask, []

    def mask(constraint):
        asked.append(constraint)
        if len(asked) > 1:
            raise RequestError("The text cannot go on within the grammar.", ["too many items"])
        return inner(constraint)

    monkeypatch.setattr(GrammarConstraint, "mask", mask)
    with pytest.raises(RequestError, match="too many items"):
        plain.generate("x", params_of(Grammar("json_object"), 0.0))
    monkeypatch.undo()
    assert plain.generate("x", params_of(Grammar("choice", '["no"]'), 0.0))[0].text == "no"


def test_a_constraint_without_effect_is_dropped(engine):
    """Once the thinking is over, a greedy request takes the short way again."""
    [request] = engine("none").requests("x", params_of(None, 0.0, thinking=Thinking(1)))
    assert not request.chooser.takes_likeliest
    request.take([50], 0)
    assert not request.chooser.takes_likeliest
    request.take([THINK_END], 0)
    assert request.chooser.takes_likeliest


def test_requests_without_constraints_have_none(engine):
    [request] = engine("none").requests("x", params_of(None, 0.0))
    assert isinstance(request, Request)
    assert request.chooser.takes_likeliest


def test_texts_go_on_after_preemption(engine, demo_engine_directory):
    """The grammar's place is kept while a request waits."""
    params = params_of(Grammar("json_schema", json.dumps(PERSON)), 0.0)
    [plain] = engine("none").generate("x", params)
    few = Engine.load(demo_engine_directory, max_sequences=1, speculate="mtp", draft_length=3)
    low = few.stream("x", params)
    chunks = [next(low) for _ in range(6)]
    few.generate("y", SamplingParams(max_tokens=3), scheduling=Scheduling(priority=5))
    chunks += low
    assert few.statistics().preemptions > 0
    assert tuple(c.token_id for c in chunks) == plain.token_ids
