# SPDX-License-Identifier: Apache-2.0
"""The front of a server without a server: who is answered, refused and told what."""

from __future__ import annotations

import json
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from nemo_build.errors import RequestError, UserError
from nemo_build.runtime import Engine, FinishReason, Grammar, SamplingParams, Thinking
from nemo_build.runtime.output import Chunk
from nemo_build.triton_repo import BUSY, FAULT, front
from nemo_build.triton_repo.asked import parse
from nemo_build.triton_repo.delivery import Answer
from nemo_build.triton_repo.front import Front
from nemo_build.triton_repo.remote import Steps, StepsFailedError
from nemo_build.triton_repo.responses import Responses

DEFAULTS = SamplingParams(temperature=0.6)


class Client:
    """A client that keeps what it gets."""

    def __init__(self, broken: bool = False) -> None:
        self.texts: list[str] = []
        self.outputs: list[dict] = []
        self.reasons: list[str] = []
        self.counts = [0, 0]
        self.error: str | None = None
        self.over = threading.Event()
        self.gone = False
        self.asked_late = False
        self._broken = broken

    def send(self, outputs, *, final: bool) -> None:
        if self._broken:
            raise RuntimeError("the pipe is broken")
        self.outputs.append(outputs)
        self.texts.append(outputs["text_output"][0].decode())
        self.reasons.append(outputs["finish_reason"][0].decode())
        self.counts[0] += int(outputs["num_input_tokens"][0])
        self.counts[1] += int(outputs["num_output_tokens"][0])
        if final:
            self.over.set()

    def fail(self, message: str, *, busy: bool = False) -> None:
        assert message.startswith(BUSY) == busy
        self.error = message.removeprefix(FAULT)
        self.is_fault = message.startswith(FAULT)
        self.over.set()

    def cancelled(self) -> bool:
        self.asked_late = self.asked_late or self.over.is_set()
        return self.gone


def tensors(**values):
    kinds = {str: np.object_, bool: np.bool_, int: np.int32, float: np.float32, bytes: np.object_}
    found = {}
    for name, value in values.items():
        items = value if isinstance(value, list) else [value]
        items = [v.encode() if isinstance(v, str) else v for v in items]
        found[name] = np.array([items], kinds[type(items[0])] if items else np.object_)
    return found


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory, max_sequences=2)


@pytest.fixture
def serving(engine):
    made = Front(lambda: engine)
    yield made
    made.close()


def ask(serving: Front, client: Client | None = None, **values) -> Client:
    client = client or Client()
    serving.submit(tensors(**values), client)
    return client


def test_answers_are_those_of_the_engine(engine, serving):
    params = SamplingParams(max_tokens=12, temperature=0)
    want = engine.generate("import", params)[0]
    whole = ask(serving, text_input="import", max_tokens=12, temperature=0.0)
    pieces = ask(serving, text_input="import", max_tokens=12, temperature=0.0, stream=True)
    echo = ask(serving, text_input="import", max_tokens=12, temperature=0.0, exclude_input_in_output=False)
    for client in (whole, pieces, echo):
        assert client.over.wait(20)
        assert client.error is None
        assert client.counts == [want.prompt_tokens, 12]
        assert client.reasons[-1] == "length"
        time.sleep(0.1)
        assert not client.asked_late, "which would end a real server"
    assert whole.texts == [want.text]
    assert len(pieces.texts) > 1
    assert "".join(pieces.texts) == want.text
    assert echo.texts == ["import" + want.text]


def test_what_is_wrong_ends_its_request_alone(engine, serving, monkeypatch):
    for values, said in (
        ({"text_input": ""}, "no tokens"),
        ({"text_input": b"\xff"}, "not UTF-8"),
        ({"text_input": "x", "temperature": float("nan")}, "temperature"),
        ({"text_input": "a\n" * 2000}, "context"),
        ({"text_input": "x" * 4_000_000}, "4000000 bytes"),
        ({"text_input": "x", "no_such": 1}, "no_such"),
        ({"text_input": "x", "bad_words": "y" * 9000}, "bad_words"),
        ({"input_ids": [10**6]}, "outside 0.."),
        ({"input_ids": []}, "no tokens"),
        ({}, "one of them must be given"),
    ):
        client = ask(serving, **values)
        assert client.over.wait(20)
        assert said in client.error
        assert not client.is_fault
        assert len(client.error) < 2100
    monkeypatch.setattr(front, "parse", lambda *_: 1 / 0)
    client = ask(serving, text_input="x")
    assert client.over.wait(20)
    assert "ZeroDivisionError" in client.error
    assert client.is_fault
    monkeypatch.undo()
    broken = ask(serving, Client(broken=True), text_input="x", max_tokens=2)
    fine = ask(serving, text_input="x", max_tokens=2)
    assert fine.over.wait(20)
    assert fine.error is None
    assert not broken.over.is_set()


def test_token_ids_are_a_prompt_as_well(engine, serving):
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=1)
    prompt = engine.tokenizer.encode("import os", add_special_tokens=True)
    want = engine.generate("import os", params)[0]
    given = {"max_tokens": 12, "temperature": 0.0, "exclude_input_in_output": False}
    client = ask(serving, input_ids=prompt, logprobs=1, return_log_probs=True, return_details=True, **given)
    assert client.over.wait(20)
    assert client.texts == ["import os" + want.text]
    [outputs] = client.outputs
    details = json.loads(outputs["details"][0])
    assert tuple(details["token_ids"]) == want.token_ids
    assert details["ends"][-1] == len("import os" + want.text)
    assert details["drafted"] == [0] * 12
    assert details["stop_reason"] is None
    found = json.loads(outputs["logprobs"][0])
    assert [(f["logprob"], [tuple(t) for t in f["top"]]) for f in found] == [
        (p.logprob, list(p.top)) for p in want.logprobs
    ]
    assert outputs["output_log_probs"] == pytest.approx([p.logprob for p in want.logprobs])
    plain = ask(serving, input_ids=prompt, **given)
    assert plain.over.wait(20)
    assert plain.texts == client.texts
    older = {"text_output", "finish_reason", "num_input_tokens", "num_output_tokens"}
    assert plain.outputs[0].keys() == {*older, "total_accepted_draft_tokens"}, (
        "what nobody asked for is not sent"
    )


def test_control_tokens_are_shown_to_those_who_ask(engine, serving):
    end = engine.eos_ids[0]
    bias = json.dumps({"logit_bias": {str(end): 100}, "include_stop": True, "stop_token_ids": [end]})
    for skips in (True, False):
        client = ask(
            serving, text_input="x", sampling_parameters=bias, skip_special_tokens=skips, return_details=True
        )
        assert client.over.wait(20)
        assert client.texts == ["" if skips else engine.tokenizer.token_bytes(end).decode()]
        assert json.loads(client.outputs[0]["details"][0])["stop_reason"] == end


def test_grammars_are_compiled_beside_the_other_requests(engine, serving, monkeypatch):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    guide = json.dumps(schema | {"additionalProperties": False})
    given = {"guided_decoding_guide_type": "json_schema", "guided_decoding_guide": guide, "temperature": 0.0}
    client = ask(serving, text_input="x", max_tokens=40, **given)
    assert client.over.wait(20)
    assert json.loads(client.texts[0])["a"] == "x"
    may_go = threading.Event()
    requests = engine.requests

    def slow(prompts, params, *arguments):
        if params.grammar is not None:
            assert may_go.wait(20)
        return requests(prompts, params, *arguments)

    monkeypatch.setattr(engine, "requests", slow)
    slow_ones = [ask(serving, text_input="x", max_tokens=40, **given) for _ in range(3)]
    quick = ask(serving, text_input="x", max_tokens=2)
    assert quick.over.wait(5)
    assert not any(c.over.is_set() for c in slow_ones)
    serving._most_waiting = 3
    assert ask(serving, text_input="x").error == "busy: 3 requests wait already"
    report = ask(serving, report=True)
    assert report.over.wait(5), "a report takes no place"
    assert json.loads(report.texts[0])["slots"] == 2
    may_go.set()
    serving.close()
    assert all(c.texts == client.texts for c in slow_ones), "what was taken is answered before the end"
    refused = Front(lambda: engine)
    wrong = ask(refused, text_input="x", guided_decoding_guide_type="regex", guided_decoding_guide="(")
    assert wrong.over.wait(20)
    assert "regex" in wrong.error
    assert not wrong.is_fault
    refused.close()


def test_after_the_last_response_the_server_is_asked_nothing():
    client = Client()
    request = SimpleNamespace(prompt_tokens=1)
    answer = Answer(client, Responses(given(), request), streams=True)
    assert answer.add([Chunk(0, "a", 5)], finished=False)
    answer.send()
    answer.look()
    assert not answer.gone
    assert answer.add([Chunk(0, "b", 6, FinishReason.STOP), Chunk(0, "c", None)], finished=True)
    answer.send()
    answer.send()
    assert client.texts == ["a", "bc"]
    assert client.counts == [1, 2]
    client.gone = True
    answer.look()
    assert not client.asked_late, "which would end a real server"


def test_who_has_gone_has_no_slot(engine, serving):
    clients = [ask(serving, text_input="x", max_tokens=900, ignore_eos=True, stream=True) for _ in range(2)]
    while not all(c.texts for c in clients):
        time.sleep(0.01)
    for client in clients:
        client.gone = True
    last = ask(serving, text_input="import", max_tokens=2)
    assert last.over.wait(5)
    serving.close()
    assert engine.statistics().free_slots == 2
    assert not engine.unfinished


def test_a_step_that_fails_is_told_and_the_next_one_works(engine, serving, monkeypatch, capsys):
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: 1 / 0)
    client = ask(serving, text_input="x", max_tokens=3)
    assert client.over.wait(10)
    assert "division by zero" in client.error
    assert client.is_fault
    monkeypatch.setattr(engine, "step", step)
    client = ask(serving, text_input="x", max_tokens=3)
    assert client.over.wait(10)
    assert client.error is None
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_too_many_are_refused(engine, monkeypatch):
    may_go = threading.Event()

    def connect() -> Engine:
        may_go.wait(20)
        return engine

    serving = Front(connect, most_waiting=2)
    first = ask(serving, text_input="x", max_tokens=2)
    while serving._inbox:
        time.sleep(0.01)
    waiting = [ask(serving, text_input="x", max_tokens=2) for _ in range(2)]
    refused = ask(serving, text_input="x")
    assert refused.error == "2 requests wait for the engine to open", "a probe must not take that for busy"
    monkeypatch.setattr(serving, "_engine", engine)
    assert ask(serving, text_input="x").error == "busy: 2 requests wait already"
    serving._stepping_since = time.monotonic() - 100
    stuck = ask(serving, text_input="x")
    assert "a step has not ended for 100 seconds" in stuck.error
    serving._stepping_since = None
    monkeypatch.undo()
    may_go.set()
    serving.close()
    for client in (first, *waiting):
        assert client.over.is_set(), "what was taken is answered before the end"
        assert client.error is None
    late = ask(serving, text_input="x")
    assert late.error == "busy: the server is going down"


def test_an_engine_that_does_not_open_is_tried_again(engine):
    tries = iter([UserError("there is no engine"), None])

    def connect() -> Engine:
        if error := next(tries):
            raise error
        return engine

    serving = Front(connect)
    client = ask(serving, text_input="x", max_tokens=1)
    assert client.over.wait(10)
    assert "there is no engine" in client.error
    client = ask(serving, text_input="x", max_tokens=1)
    assert client.over.wait(10)
    assert client.error is None
    serving.close()


def test_a_front_that_nobody_asked_ends(engine):
    Front(lambda: engine).close()


def given(**values):
    return parse({"text_input": np.array([[b"x"]], np.object_)} | tensors(**values), DEFAULTS)


def test_parameters_of_all_dialects():
    assert given().params == DEFAULTS
    assert given(temperature=0.7).params.temperature == 0.7, "not 0.699999988"
    found = given(min_length=3, random_seed=5, stop_words=["a", ""], end_id=7, top_k=4, priority=2)
    assert (found.params.min_tokens, found.params.seed, found.params.top_k) == (3, 5, 4)
    assert (found.params.stop, found.params.stop_token_ids) == (("a",), (7,))
    assert found.scheduling.priority == 2
    assert given(end_id=-1, bad_words=[]).params.stop_token_ids == ()
    assert given(min_tokens=500).params.min_tokens == 256
    asked = {"temperature": "0.5", "stop": "5", "logit_bias": {"7": 1}, "ignore_eos": True, "best_of": 1}
    found = given(sampling_parameters=json.dumps(asked))
    assert (found.params.temperature, found.params.stop) == (0.5, ("5",))
    assert found.params.logit_bias == {7: 1.0}
    assert given(sampling_parameters='{"top_k": 3}', top_k=4).params.top_k == 4
    assert given(streaming=True).streams
    asked = {"grammar": {"kind": "regex", "text": "a+"}, "thinking": {"budget": "7"}, "logprobs": "2"}
    with pytest.raises(RequestError, match="budget"):
        given(sampling_parameters=json.dumps(asked))
    asked["thinking"] = {"budget": 7}
    found = given(sampling_parameters=json.dumps(asked), logprobs=3)
    assert (found.params.grammar, found.params.thinking) == (Grammar("regex", "a+"), Thinking(7))
    assert found.params.logprobs == 3
    assert given(return_logprobs=True).params.logprobs == 0
    assert given(sampling_parameters='{"logprobs": 2}', return_log_probs=True).params.logprobs == 2
    assert given().params.logprobs is None
    assert given(guided_decoding_guide_type="json").params.grammar == Grammar("json_object")
    assert given(guided_decoding_guide_type="", guided_decoding_guide="").params.grammar is None
    found = given(salt="a", speculate=False, skip_special_tokens=False)
    assert (found.scheduling.salt, found.scheduling.speculate, found.skips_special) == ("a", False, False)
    assert (given().scheduling.salt, given().scheduling.speculate, given().skips_special) == (
        None,
        True,
        True,
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"sampling_parameters": "[" * 100_000}, "no JSON"),
        ({"sampling_parameters": json.dumps({"top_k": "[" * 100_000})}, "top_k"),
        ({"sampling_parameters": '{"min_tokens": "x", "max_tokens": null}'}, "min_tokens"),
        ({"sampling_parameters": '{"top_p": 1' + "0" * 400 + "}"}, "top_p"),
        ({"sampling_parameters": '{"n": 2, "odd": 1}'}, "n is 2.*\n.*odd"),
        ({"stop_words": ["x"] * 65}, "65 stop"),
        ({"beam_width": 2, "return_perf_metrics": True}, "beam_width is 2.*\n.*return_perf_metrics"),
        ({"timeout": float("nan")}, "timeout"),
        ({"input_ids": [1, 2]}, "one of them"),
        ({"guided_decoding_guide_type": "ebnf_grammar", "guided_decoding_guide": "x"}, "ebnf_grammar"),
        ({"guided_decoding_guide": "x"}, "guided_decoding_guide_type"),
        ({"logprobs": 21}, "logprobs"),
        ({"sampling_parameters": '{"grammar": {"text": "x"}}'}, "kind"),
    ],
)
def test_parameters_that_are_wrong(values, said):
    with pytest.raises(RequestError, match=said):
        given(**values)


def test_models_that_fail_for_good_are_not_started_for_ever():
    class Dead:
        repairs = 0

        def call(self, model, inputs, outputs):
            raise StepsFailedError(f"{model} is dead")

        def repair(self) -> None:
            self.repairs += 1

    models = Dead()
    steps = Steps(models)
    for _ in range(3):
        with pytest.raises(Exception, match="verify is dead"):
            steps.call("verify", {}, ())
    with pytest.raises(UserError, match=r"loaded 3 times: verify is dead"):
        steps.call("verify", {}, ())
    assert models.repairs == 3
