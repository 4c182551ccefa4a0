# SPDX-License-Identifier: Apache-2.0
"""The server's routes on the demo engine, over HTTP."""

from __future__ import annotations

import json
import math
import threading
from unittest.mock import ANY

import pytest

from nemo_build import __version__
from nemo_build.runtime import Engine, SamplingParams
from nemo_build.runtime.server import chat, completions, tokens
from nemo_build.runtime.server.asking import scheduling_of
from nemo_build.runtime.server.backend import PROBE_PRIORITY, EngineBackend
from nemo_build.runtime.server.schemas.common import Sampling

from .serving import Served, served

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SPECULATE = "mtp"


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    return Engine.load(
        demo_engine_directory, speculate=SPECULATE, draft_length=3, prefix_cache=16 << 20, threads=1
    )


@pytest.fixture(scope="module")
def server(engine) -> Served:
    with served(EngineBackend(engine, speculate=SPECULATE)) as found:
        yield found


def text_of(chunks: list[dict], index: int = 0, member: str = "content") -> str:
    """The text of a stream's choice."""
    return "".join(
        choice["delta"].get(member) or ""
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["index"] == index
    )


# --- chat ----------------------------------------------------------------------------------------------------


def test_an_answer_is_what_the_engine_generates(server, engine):
    answer = server.post(CHAT, messages=HELLO, temperature=0, max_tokens=60, model="engine")
    prompt = engine.chat_prompt(HELLO)
    [want] = engine.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=60), skip_special_tokens=False
    )
    [choice] = answer["choices"]
    reasoning, _, content = want.text.partition("</think>")
    assert choice["message"]["reasoning_content"] == reasoning.rstrip("\n")
    assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"]
    assert choice["message"]["content"] == content.lstrip("\n")
    assert choice["finish_reason"] == ("length" if want.finish_reason == "length" else "stop")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(prompt)
    assert usage["completion_tokens"] == len(want.token_ids)
    assert usage["total_tokens"] == len(prompt) + len(want.token_ids)
    details = usage["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < usage["completion_tokens"]
    assert 0 < details["accepted_prediction_tokens"] < usage["completion_tokens"]
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "engine"
    assert answer["system_fingerprint"].startswith("fp_")


def test_a_stream_is_the_same_in_pieces(server):
    ask = {"messages": HELLO, "temperature": 0, "max_tokens": 60}
    whole = server.post(CHAT, **ask)
    chunks = server.chunks(CHAT, **ask, stream_options={"include_usage": True})
    message = whole["choices"][0]["message"]
    assert text_of(chunks) == message["content"]
    assert text_of(chunks, member="reasoning_content") == message["reasoning_content"]
    assert text_of(chunks, member="reasoning") == message["reasoning"]
    *others, last = chunks
    assert last["choices"] == []
    assert all(c["usage"] is None for c in others)
    assert others[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert others[-1]["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert [c["choices"][0]["finish_reason"] for c in others[:-1]] == [None] * (len(others) - 1)
    assert len({c["id"] for c in chunks}) == 1
    for name in ("prompt_tokens", "completion_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert "usage" not in server.chunks(CHAT, **ask)[-1]


def test_tokens_of_a_step_are_one_chunk(server):
    chunks = server.chunks(CHAT, messages=HELLO, temperature=0, max_tokens=60, nemo={"tokens": True})
    members = [c["nemo"] for c in chunks if "nemo" in c]
    tokens = [t for m in members for t in m["tokens"]]
    text = "".join(t["text"] for t in tokens)
    assert text_of(chunks, member="reasoning") in text
    assert text_of(chunks) in text
    assert any(t["drafted"] for t in tokens)
    assert len(members) < len(tokens)
    assert members[-1]["speculator"] == SPECULATE
    own = sum(not t["drafted"] for t in tokens)
    assert members[-1]["acceptance_length"] == pytest.approx(len(tokens) / own, abs=1e-3)


def test_drafts_can_be_turned_off_for_a_request(server):
    ask = {"messages": HELLO, "temperature": 0, "max_tokens": 60}
    without = server.post(CHAT, **ask, nemo={"speculate": False})
    with_drafts = server.post(CHAT, **ask)
    assert without["choices"] == with_drafts["choices"]
    counts = [
        a["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] for a in (without, with_drafts)
    ]
    assert counts[0] == 0 < counts[1]
    rejected = with_drafts["usage"]["completion_tokens_details"]["rejected_prediction_tokens"]
    assert rejected > 0


def test_several_answers_have_seeds_of_their_own(server):
    ask = {"messages": HELLO, "max_tokens": 30, "seed": 7, "temperature": 1.5, "n": 3}
    first, again = (server.post(CHAT, **ask) for _ in range(2))
    assert first["choices"] == again["choices"]
    assert [c["index"] for c in first["choices"]] == [0, 1, 2]
    texts = [json.dumps(c["message"]) for c in first["choices"]]
    assert len(set(texts)) == 3
    assert server.post(CHAT, **ask | {"n": 1})["choices"][0] == first["choices"][0]
    chunks = server.chunks(CHAT, **ask, stream_options={"include_usage": True})
    for choice in first["choices"]:
        streamed = text_of(chunks, choice["index"], "reasoning")
        assert streamed == (choice["message"]["reasoning"] or "")
    assert chunks[-1]["usage"]["completion_tokens"] == first["usage"]["completion_tokens"]
    # The prompt counts once.
    assert first["usage"]["prompt_tokens"] == server.post(CHAT, **ask | {"n": 1})["usage"]["prompt_tokens"]


def test_logprobs(server):
    ask = {"messages": HELLO, "temperature": 0, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    answer = server.post(CHAT, **ask)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 12
    for token in content:
        assert token["logprob"] <= 0
        assert bytes(token["bytes"]).decode() == token["token"]
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]
    chunks = server.chunks(CHAT, **ask)
    streamed = [
        token
        for chunk in chunks
        for choice in chunk["choices"]
        for token in (choice["logprobs"] or {}).get("content", [])
    ]
    assert [t["token"] for t in streamed] == [t["token"] for t in content]
    assert server.post(CHAT, messages=HELLO, max_tokens=3)["choices"][0]["logprobs"] is None


def test_sampling_members_reach_the_engine(server, engine):
    ask = {"prompt": "import os\n", "max_tokens": 16, "temperature": 0}
    plain = server.post(COMPLETE, **ask)["choices"][0]["text"]
    first = engine.tokenizer.encode(plain)[0]
    biased = server.post(COMPLETE, **ask, logit_bias={str(first): -100})["choices"][0]["text"]
    assert biased != plain
    for change in ({"repetition_penalty": 5.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        assert server.post(COMPLETE, **ask, **change)["choices"][0]["text"] != plain
    hot = {**ask, "temperature": 5.0, "seed": 3}
    assert server.post(COMPLETE, **hot, top_k=1)["choices"][0]["text"] == plain
    assert server.post(COMPLETE, **hot, min_p=1.0)["choices"][0]["text"] == plain
    assert server.post(COMPLETE, **hot)["choices"][0]["text"] != plain


def test_the_least_nucleus_is_the_likeliest_token(server):
    ask = {"prompt": "import os\n", "max_tokens": 16}
    hot = {**ask, "temperature": 5.0, "seed": 3}
    assert server.post(COMPLETE, **hot, top_p=0) == {
        **server.post(COMPLETE, **ask, temperature=0),
        **dict.fromkeys(("id", "created", "usage"), ANY),
    }


def test_priorities_stay_below_that_of_the_probe():
    def scheduled(priority: int) -> int:
        return scheduling_of(Sampling(priority=priority), None).priority

    most = PROBE_PRIORITY - 1
    assert [scheduled(p) for p in (-1_000_000, -5, 0, 5, 1_000_000)] == [-most, -5, 0, 5, most]


def test_stops(server):
    ask = {"prompt": "import os\n", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    text = server.post(COMPLETE, **ask)["choices"][0]["text"]
    stop = text[5:8]
    [choice] = server.post(COMPLETE, **ask, stop=[stop, "never"])["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"
    [choice] = server.post(COMPLETE, **ask, stop=stop, include_stop_str_in_output=True)["choices"]
    assert choice["text"] == text[: text.index(stop) + len(stop)]
    streamed = server.chunks(COMPLETE, **ask, stop=stop)
    assert "".join(c["choices"][0]["text"] for c in streamed) == text[: text.index(stop)]
    token = server.post("/tokenize", prompt=text)["tokens"][0]
    assert server.post(COMPLETE, **ask, stop_token_ids=[token])["choices"][0]["text"] == ""
    [choice] = server.post(COMPLETE, **ask, stop_token_ids=[token], min_tokens=5)["choices"]
    assert len(choice["text"]) > 0


def test_thinking_can_be_turned_off(server):
    off = [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"reasoning": {"enabled": False}},
    ]
    for change in off:
        answer = server.post(CHAT, messages=HELLO, temperature=0, max_tokens=10, **change)
        assert answer["choices"][0]["message"]["reasoning_content"] is None, change
        assert answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    on = server.post(CHAT, messages=HELLO, temperature=0, max_tokens=4, reasoning_effort="high")
    assert on["choices"][0]["message"]["reasoning_content"]


@pytest.mark.parametrize(
    "spelling",
    [
        {"thinking_token_budget": 3},
        {"thinking_budget": 3},
        {"custom_params": {"thinking_budget": 3}},
        {"nvext": {"max_thinking_tokens": 3}},
        {"chat_template_kwargs": {"thinking_budget": 3}},
        {"reasoning": {"max_tokens": 3}},
    ],
    ids=lambda s: next(iter(s)),
)
def test_a_thinking_budget(server, spelling):
    free = server.post(CHAT, messages=HELLO, temperature=0, max_tokens=60)
    assert free["usage"]["completion_tokens_details"]["reasoning_tokens"] > 4
    answer = server.post(CHAT, messages=HELLO, temperature=0, max_tokens=60, **spelling)
    # The tokens of thinking, and </think>.
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 4
    assert answer["choices"][0]["message"]["content"]


def test_a_thinking_budget_waits_a_little_for_the_end_of_a_line(server):
    ask = {"messages": HELLO, "temperature": 0, "max_tokens": 60, "seed": 0}
    bias = {"logit_bias": {str(i): -100 for i in _tokens_that_end_thinking(server)}}
    answer = server.post(CHAT, **ask, **bias, thinking_budget=30)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 30 + 3 + 1


def _tokens_that_end_thinking(server) -> list[int]:
    """Those of ``</think>`` and of line ends, of single tokens."""
    texts = ("</think>", "\n", "\n\n", ".\n", ".\n\n", " \n", ":\n", "<|im_end|>")
    found = [server.post("/tokenize", prompt=text, add_special_tokens=False)["tokens"] for text in texts]
    return sorted({tokens[0] for tokens in found if len(tokens) == 1})


def test_the_prefix_cache_is_told_of(server):
    ask = {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 2, "temperature": 0}
    cached = [server.post(CHAT, **ask)["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in range(3)]
    assert cached[0] == 0 < cached[-1]
    other = server.post(CHAT, **ask, cache_salt="another")
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_message_can_be_continued(server):
    messages = [*HELLO, {"role": "assistant", "content": "The list type"}]
    ask = {"messages": messages, "temperature": 0, "max_tokens": 6}
    answer = server.post(CHAT, **ask, continue_final_message=True, add_generation_prompt=False)
    assert answer["choices"][0]["message"]["reasoning_content"] is None
    assert answer["choices"][0]["message"]["content"]


# --- completions ---------------------------------------------------------------------------------------------


def test_completions_of_several_prompts(server, engine):
    prompts = ["import os\n", "class"]
    answer = server.post(COMPLETE, prompt=prompts, max_tokens=10, temperature=0, n=2)
    want = engine.generate(prompts, SamplingParams(max_tokens=10, temperature=0))
    assert [c["text"] for c in answer["choices"]] == [w.text for w in want for _ in range(2)]
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == sum(w.prompt_tokens for w in want)
    assert answer["usage"]["completion_tokens"] == 40
    ids = [engine.tokenizer.encode(p, add_special_tokens=True) for p in prompts]
    same = server.post(COMPLETE, prompt=ids, max_tokens=10, temperature=0)
    assert [c["text"] for c in same["choices"]] == [w.text for w in want]
    [one] = server.post(COMPLETE, prompt=ids[0], max_tokens=10, temperature=0)["choices"]
    assert one["text"] == want[0].text
    assert (
        len(server.post(COMPLETE, prompt="class", temperature=0, ignore_eos=True)["choices"][0]["text"]) > 0
    )


def test_echo_and_logprobs_of_completions(server):
    ask = {"prompt": "import os\n", "max_tokens": 10, "temperature": 0}
    [plain] = server.post(COMPLETE, **ask)["choices"]
    [echoed] = server.post(COMPLETE, **ask, echo=True)["choices"]
    assert echoed["text"] == "import os\n" + plain["text"]
    chunks = server.chunks(COMPLETE, **ask, echo=True)
    assert "".join(c["choices"][0]["text"] for c in chunks) == echoed["text"]
    [told] = server.post(COMPLETE, **ask, logprobs=2)["choices"]
    logprobs = told["logprobs"]
    assert "".join(logprobs["tokens"]) == told["text"]
    assert logprobs["text_offset"][0] == 0
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    for i, token in enumerate(logprobs["tokens"]):
        assert told["text"][logprobs["text_offset"][i] :].startswith(token)
        assert logprobs["token_logprobs"][i] == max(logprobs["top_logprobs"][i].values())


def test_what_completions_refuse(server):
    cases = {
        "suffix": {"suffix": "end"},
        "best_of": {"best_of": 3},
        "echo": {"echo": True, "logprobs": 1},
        "n": {"n": 65},
    }
    for param, change in cases.items():
        assert server.refused(COMPLETE, prompt="a", **change)["param"] == param
    assert server.refused(COMPLETE, prompt=[])["param"] == "prompt"
    assert server.refused(COMPLETE, prompt="")["param"] == "prompt"
    assert server.refused(COMPLETE, prompt=[10**6])["param"] == "prompt"
    assert server.refused(COMPLETE, prompt=["a"] * 40, n=2)["param"] == "prompt"


def test_a_prompt_that_is_too_long(server):
    error = server.refused(COMPLETE, prompt="x " * 3000)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "1024" in error["message"]
    error = server.refused(CHAT, messages=[{"role": "user", "content": "x " * 3000}])
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    # One that just fits leaves room for a token.
    [choice] = server.post(COMPLETE, prompt=[5] * 1024, max_tokens=10)["choices"]
    assert choice["finish_reason"] in ("length", "stop")


# --- the rest ------------------------------------------------------------------------------------------------


def test_tokens_there_and_back(server):
    found = server.post("/tokenize", prompt="import os\nprint(é)", return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 1024
    assert server.post("/detokenize", tokens=found["tokens"])["prompt"] == "import os\nprint(é)"
    chat = server.post("/tokenize", messages=HELLO)
    text = server.post("/detokenize", tokens=chat["tokens"])["prompt"]
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    same = {"messages": HELLO, "chat_template_kwargs": {"self": 1, "cls": 2, "/": 3}}
    assert server.post("/tokenize", **same)["tokens"] == chat["tokens"]
    assert server.post(CHAT, **same, max_tokens=1)["usage"]["prompt_tokens"] == chat["count"]
    assert server.post("/v1/responses", input="a", max_output_tokens=1, chat_template_kwargs={"self": 1})
    assert server.refused("/tokenize", prompt="a", messages=HELLO)["param"] == "prompt"
    assert server.refused("/detokenize", tokens=[10**6])["param"] == "tokens"


def test_what_takes_time_is_done_beside_the_loop(server, monkeypatch):
    places = []

    def watched(module, name):
        function = getattr(module, name)

        def watch(*args):
            places.append((name, threading.current_thread().name))
            return function(*args)

        monkeypatch.setattr(module, name, watch)

    watched(tokens, "token_text")
    watched(tokens, "_detokenized")
    watched(chat, "asked_of")
    server.post("/tokenize", prompt="a", return_token_strs=True)
    server.post("/detokenize", tokens=[1])
    server.post(CHAT, messages=HELLO, max_tokens=1)
    assert {name for name, _ in places} == {"token_text", "_detokenized", "asked_of"}
    assert "server" not in {thread for _, thread in places}  # which has the loop


def test_most_tokens_of_a_text(server, monkeypatch):
    monkeypatch.setattr(tokens, "MOST_TOKENS", 3)
    assert server.post("/tokenize", prompt=" ", add_special_tokens=False)["count"] <= 3
    assert server.refused("/tokenize", prompt="a b c d e f")["param"] == "prompt"


def test_prompts_are_counted_before_they_are_encoded(server, monkeypatch):
    monkeypatch.setattr(completions, "encode", None)
    assert server.refused(COMPLETE, prompt=["a"] * 33, n=2)["param"] == "prompt"
    assert server.refused(COMPLETE, prompt=["a"] * 65)["param"] == "prompt"


def test_models_version_and_info(server):
    get = server.client.get
    [model] = get("/v1/models").json()["data"]
    assert model["id"] == "engine"
    assert get("/v1/models/engine").json() == model
    assert get("/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert get("/v1/models/other").status_code == 404
    assert get("/version").json() == {"version": __version__}
    info = get("/nemo/info").json()
    assert info["model"] == "engine"
    assert info["context"] == 1024
    assert info["speculator"] == SPECULATE
    assert set(info["speculators"]) == {"mtp", "ngram", "dflash", "dspark"}
    assert info["sampling"]["temperature"] == 1.0
    answer = server.client.post(CHAT, json={"messages": HELLO, "model": "other"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")


def test_health_and_metrics(server):
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/ready").json() == {"status": "ready"}
    server.post(CHAT, messages=HELLO, max_tokens=2)
    text = server.client.get("/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    found = {name.split("{")[0]: float(value) for name, value in lines.items()}
    assert found["nemo:generation_tokens_total"] > 0
    assert found["nemo:num_requests_running"] == 0
    assert not any(math.isnan(v) for v in found.values())


def test_the_page_is_there(server):
    answer = server.client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")


def test_a_client_that_goes_away_frees_its_slot(server):
    ask = {"messages": HELLO, "max_tokens": 900, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with server.client.stream("POST", CHAT, json=ask) as answer:
            next(answer.iter_lines())
            steps = server.backend.statistics().scheduler.steps
        assert server.idle()
        assert server.backend.statistics().scheduler.steps - steps < 400
