# SPDX-License-Identifier: Apache-2.0
"""Measuring an engine: prompts, load, checks, and the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from nemo_build.cli import cli
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.errors import RequestError, UserError
from nemo_build.runtime import Chunk, Engine, FinishReason, SamplingParams
from nemo_build.runtime.bench import Bench, BenchOptions, Setting, load
from nemo_build.runtime.bench.load import LoadGenerator, Trace, make_requests, poisson_arrivals
from nemo_build.runtime.bench.plots import charts
from nemo_build.runtime.bench.prompts import DEFAULT_PROMPTS, Prompt, TokenPrompt, read_prompts, tokenize
from nemo_build.runtime.bench.report import (
    build_report,
    report_page,
    report_text,
    require_equal,
)
from nemo_build.runtime.bench.run import (
    Difference,
    GreedyCheck,
    Measured,
    Results,
    expand_speculators,
    make_settings,
)
from nemo_build.runtime.speculation.kinds import SPECULATORS

from .bench_traces import CATEGORIES, request

FAST = ["--input-len", 12, "--output-len", 6, "--warmup", 1, "--rounds", 1]


@pytest.fixture(scope="module")
def engine(demo_engine_directory) -> Engine:
    """The demo engine. Only its tokenizer and template are used."""
    return Engine.load(demo_engine_directory, max_sequences=1)


def run(*arguments: object):
    """Run in this process; the result's ``stdout`` holds what it printed."""
    return CliRunner().invoke(cli, [str(a) for a in ("bench", *arguments)], catch_exceptions=False)


# --- prompts ---------------------------------------------------------------------------------------------------


def test_shipped_prompts():
    prompts = read_prompts(DEFAULT_PROMPTS)
    assert {p.category for p in prompts} == set(CATEGORIES)
    assert len({p.content for p in prompts}) == len(prompts)


def test_categories_take_turns_and_lengths_are_kept(engine):
    prompts = tokenize(read_prompts(DEFAULT_PROMPTS), engine, 40)
    assert tuple(p.category for p in prompts[:5]) == CATEGORIES
    assert {len(p.tokens) for p in prompts} == {40}
    assert not any(p.wrapped for p in prompts)
    whole = tokenize(read_prompts(DEFAULT_PROMPTS), engine, None)
    assert all(w.tokens[:40] == p.tokens for w, p in zip(whole, prompts, strict=True))


def test_long_prompts_go_on_with_the_next_of_their_category(engine):
    prompts = [Prompt("a", "tokens", [1, 2]), Prompt("a", "tokens", [3]), Prompt("b", "tokens", [7])]
    found = tokenize(prompts, engine, 5)
    assert found == [
        TokenPrompt("a", (1, 2, 3, 1, 2), wrapped=True),
        TokenPrompt("b", (7, 7, 7, 7, 7), wrapped=True),
        TokenPrompt("a", (3, 1, 2, 3, 1), wrapped=True),
    ]
    assert tokenize(prompts, engine, 3)[0] == TokenPrompt("a", (1, 2, 3))
    text = tokenize([Prompt("c", "text", "word word")], engine, 300)[0]
    assert (len(text.tokens), text.wrapped) == (300, True)


def test_messages_go_through_the_template(engine):
    prompt = Prompt("chat", "messages", [{"role": "user", "content": "Hello"}])
    assert tokenize([prompt], engine, None)[0].tokens == tuple(engine.chat_prompt(prompt.content))
    with pytest.raises(RequestError, match="Leave --input-len out"):
        tokenize([prompt], engine, 10)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no JSON object"),
        ('{"category": "a"}', "has none"),
        ('{"text": "a", "tokens": [1]}', "text and tokens"),
        ('{"text": ""}', "not empty"),
        ('{"text": 1}', "must be a text"),
        ('{"tokens": [true]}', "list of token ids"),
        ('{"messages": ["a"]}', "list of messages"),
        ('{"text": "a", "category": 3}', "category must be a name"),
        ('{"text": "a", "kind": "b"}', "has kind, which mean nothing"),
    ],
)
def test_wrong_lines_are_named(tmp_path, line, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(RequestError) as caught:
        read_prompts(path)
    assert caught.value.problems[0].startswith("line 3: ")
    assert words in caught.value.problems[0]


def test_files_that_hold_no_prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    with pytest.raises(RequestError, match="No such file"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(RequestError, match="hold none"):
        read_prompts(path)
    path.write_bytes(b"\xff")
    with pytest.raises(RequestError, match="not UTF-8: byte 0"):
        read_prompts(path)
    path.write_text("x\n" * 30)
    with pytest.raises(RequestError, match="and 20 more"):
        read_prompts(path)


# --- load ------------------------------------------------------------------------------------------------------


def test_a_stream_sends_its_next_request_when_the_last_one_ends(monkeypatch):
    """Two streams, four requests; the clock counts its readings: one at the start, one for each token."""
    ends = iter([(0, False), (1, True), (0, True), (2, True), (3, True)])
    chunks = [Chunk(i, "", 7, FinishReason.LENGTH if end else None) for i, end in ends]
    monkeypatch.setattr(load, "_clock", iter(range(100)).__next__)
    done = []
    fake = SimpleNamespace(stream=lambda prompts, params: iter(chunks))
    traces = LoadGenerator(fake, 2).closed_loop([request(i) for i in range(4)], lambda: done.append(1))
    assert [t.sent for t in traces] == [0, 0, 2, 3]
    assert [t.times for t in traces] == [[1, 3], [2], [4], [5]]
    assert len(done) == 4


def test_arrivals_are_seeded():
    first = poisson_arrivals(2000, 4.0, 11)
    assert np.array_equal(first, poisson_arrivals(2000, 4.0, 11))
    assert not np.array_equal(first, poisson_arrivals(2000, 4.0, 12))
    assert first[0] == 0
    assert np.all(np.diff(first) >= 0)
    gaps = np.diff(first)
    assert gaps.mean() == pytest.approx(1 / 4, rel=0.1)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.1)  # as of an exponential distribution
    assert poisson_arrivals(1, 4.0, -1).tolist() == [0]


def test_requests_have_seeds_of_their_own():
    prompts = [TokenPrompt("a", (1,)), TokenPrompt("b", (2,))]
    found = make_requests(prompts, 3, SamplingParams(seed=2**64 - 1))
    assert [r.params.seed for r in found] == [2**64 - 1, 0, 1]
    assert [r.tokens for r in found] == [(1,), (2,), (1,)]


def test_open_loop_texts_and_errors(demo_engine_directory):
    """Requests that arrive one by one have the texts that they have together; an error of one is raised."""
    engine = Engine.load(demo_engine_directory, max_sequences=2)
    params = SamplingParams(max_tokens=5, temperature=0)
    requests = [replace(request(i, tokens=6 + i), params=params) for i in range(4)]
    generator = LoadGenerator(engine, 2)
    done = []
    opened = generator.open_loop(requests, poisson_arrivals(4, 500.0, 0), lambda: done.append(1))
    closed = generator.closed_loop(requests, lambda: None)
    assert [t.tokens for t in opened] == [t.tokens for t in closed]
    assert len(done) == 4
    assert all(t.sent <= t.times[0] for t in opened)
    with pytest.raises(RequestError, match="token ids outside"):
        generator.open_loop([replace(requests[0], tokens=(-1,))], poisson_arrivals(1, 1.0, 0), lambda: None)


# --- settings and checks ---------------------------------------------------------------------------------------


def test_all_is_what_the_engine_has_graphs_for():
    assert expand_speculators(["all"], {"target": {}, "mtp": {}}) == ("none", "mtp", "ngram")
    assert expand_speculators(["all"], {"target": {}}) == ("none", "ngram")
    assert expand_speculators(["ngram", "none", "ngram"], {}) == ("none", "ngram")


def test_settings_are_all_combinations():
    found = make_settings([1, 4, 1], ["none", "mtp"], [2, None])
    wanted = [("none", None), ("mtp", 2), ("mtp", None)]
    assert found == [Setting(n, name, length) for n in (1, 4) for name, length in wanted]
    assert [s.method for s in found[:3]] == ["none", "mtp 2", "mtp auto"]


def test_greedy_check():
    check = GreedyCheck()
    plain, setting = Setting(1, "none", None), Setting(2, "mtp", 3)
    check.add(plain, [replace_tokens(0, [1, 2, 3]), replace_tokens(1, [4])])
    check.add(setting, [replace_tokens(0, [1, 5, 3]), replace_tokens(1, [4])])
    check.add(setting, [replace_tokens(0, [1, 2])])
    assert check.compared == 3
    assert check.differences == [Difference(setting, 0, 1), Difference(setting, 0, 2)]


def replace_tokens(index: int, tokens: list[int]) -> Trace:
    return Trace(request(index), tokens=tokens)


# --- runs ------------------------------------------------------------------------------------------------------


def test_the_whole_command(demo_engine_directory, tmp_path):
    """All speculators on the demo engine, with both files and the tables."""
    outputs = ["--json", tmp_path / "r.json", "--html", tmp_path / "r.html"]
    some = ["--concurrency", "1,3", "--speculate", "all", "--draft-len", "2,auto", "--requests", 6]
    done = run(demo_engine_directory, *FAST, *some, "--temperature", 0, *outputs)
    assert done.exit_code == 0
    assert "check: all" in done.stdout
    report = json.loads((tmp_path / "r.json").read_text())
    methods = ["none", *(f"{name} {n}" for name in SPECULATORS for n in (2, "auto"))]
    assert [(s["concurrency"], s["method"]) for s in report["settings"]] == [
        (n, m) for n in (1, 3) for m in methods
    ]
    assert report["check"] == {"compared": 6 * 17, "equal": True, "differences": []}
    assert report["load"]["categories"] == {**dict.fromkeys(CATEGORIES, 1), "code": 2}
    for s in report["settings"]:
        median = s["median"]
        assert median["requests"] == 6
        assert median["prompt_tokens"] == 6 * 12
        assert median["ttft_s"]["p50"] > 0
        assert median["output_tokens_per_s"] > 0
        assert set(s["tokens_per_step_by_category"]) == set(CATEGORIES)
        if s["method"] == "none":
            assert (s["ratio_to_none"], s["tokens_per_step"]["mean"], s["acceptance"]) == (1, 1, None)
        if s["method"] == "mtp 2":
            assert len(s["acceptance"]["rates"]) == 2
            assert 1 <= s["acceptance"]["length"] <= 3
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 8
    assert "<script" not in page
    assert "http" not in page
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.html", "r.json"]


def test_sampled_texts_get_a_greedy_check_of_their_own(demo_engine_directory):
    """Also where plain decoding is not among the settings."""
    done = run(demo_engine_directory, *FAST, "--speculate", "ngram", "--requests", 3, "--json")
    report = json.loads(done.stdout)
    assert report["load"]["sampling"]["temperature"] > 0
    assert report["check"] == {"compared": 3, "equal": True, "differences": []}
    assert [s["ratio_to_none"] for s in report["settings"]] == [None]


def test_open_loop_and_prompts_of_ones_own(demo_engine_directory, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"text": "import os", "category": "<b>&"},
        {"tokens": [5, 6, 7]},
        {"messages": [{"role": "user", "content": "Hi"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    options = ["--output-len", 4, "--rounds", 2, "--warmup", 0, "--concurrency", 2, "--no-check"]
    html = ["--html", tmp_path / "r.html", "--json"]
    done = run(
        demo_engine_directory, *options, "--request-rate", 200, "--prompts", path, "--ignore-eos", *html
    )
    report = json.loads(done.stdout)
    assert report["load"]["categories"] == {"<b>&": 2, "other": 2}
    assert report["load"]["distinct_prompts"] == 3
    assert report["load"]["request_rate"] == 200
    assert report["check"] is None
    assert report["settings"][0]["median"]["output_tokens"] == 16
    assert len(report["settings"][0]["rounds"]) == 2
    page = (tmp_path / "r.html").read_text()
    assert "&lt;b&gt;&amp;" in page
    assert "<b>" not in page


def test_differing_texts_exit_with_1(demo_engine_directory, monkeypatch):
    def add(self, setting, traces):
        self.compared += 1
        self.differences.append(Difference(setting, 3, 17))

    monkeypatch.setattr(GreedyCheck, "add", add)
    with pytest.raises(UserError) as caught:
        run(demo_engine_directory, *FAST, "--requests", 1, "--temperature", 0)
    assert "request 3 differs from token 17 on" in caught.value.problems[0]


@pytest.mark.parametrize("rate", [None, 200.0])
def test_interruption_keeps_what_was_measured(demo_engine_directory, rate):
    """The second setting is interrupted: the report has the first."""
    options = BenchOptions(
        (1,), ("none", "ngram"), (2,), 4, input_length=8, output_length=4, rate=rate, warm_up=0, rounds=2
    )
    bench = Bench(demo_engine_directory, options)

    def progress(what: str, done: int, total: int) -> None:
        if what.startswith("2 of 4") and "measuring" in what and done == 2:
            signal.raise_signal(signal.SIGINT)

    results = bench.run(progress)
    assert results.interrupted
    assert [s.method for s in results.measured] == ["none"]
    report = build_report(bench, results)
    assert "interrupted" in report_text(report)
    assert "interrupted" in report_page(report)
    assert len(charts(report)) == 7  # no drafts, so no plot of them
    require_equal(report)


def test_a_report_of_nothing(demo_engine_directory):
    bench = Bench(demo_engine_directory, BenchOptions(output_length=4))
    report = build_report(bench, Results({}, GreedyCheck(), interrupted=True))
    assert "nothing to compare" in report_text(report)
    assert "<svg" not in report_page(report)
    assert Measured().rounds == []


def test_ctrl_c(demo_engine_directory, tmp_path):
    """The process prints what it has, writes its files, and exits with 130."""
    code = f"""
from nemo_build.cli import main
from nemo_build.runtime.bench.load import LoadGenerator
import time
original, calls = LoadGenerator.closed_loop, []
def slow(self, requests, finished):
    calls.append(1)
    if len(calls) == 2:
        print("measuring", flush=True)
        time.sleep(60)
    return original(self, requests, finished)
LoadGenerator.closed_loop = slow
main(["bench", {str(demo_engine_directory)!r}, "--speculate", "none,ngram", "--output-len", "4", "--warmup", "0",
      "--requests", "2", "--temperature", "0", "--json", {str(tmp_path / "r.json")!r}])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "measuring\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.strip() == "interrupted"
    assert "interrupted: what was measured" in output
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["interrupted"]
    assert [s["method"] for s in report["settings"]] == ["none"]


# --- mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--concurrency", "9"], "concurrency 9: the engine was built for 1 to 4"),
        (["--speculate", "none,magic"], "There is no speculator 'magic'"),
        (["--draft-len", "1,99"], "The draft length is 99"),
        (["--input-len", "1000", "--output-len", "100"], "need 1099 positions; the engine has 1024"),
        (["--temperature", "-1"], "temperature"),
        (["--prompts", "/nowhere.jsonl"], "cannot be read"),
        (["--html", "/nowhere/report.html"], "cannot be written"),
        (["--json", "/"], "is a directory"),
    ],
)
def test_mistakes_get_one_clear_message(demo_engine_directory, options, words):
    with pytest.raises(UserError) as caught:
        run(demo_engine_directory, *options)
    assert words in str(caught.value)


def test_a_speculator_that_the_engine_lacks(tiny_bundle, tmp_path):
    engine = build_engine(tiny_bundle, tmp_path / "engine", options=BuildOptions(1, 64)).out
    with pytest.raises(UserError, match="has no graph dspark_context"):
        run(engine, "--speculate", "dspark")


def test_all_mistakes_in_settings_are_told_at_once(demo_engine_directory):
    options = ["--concurrency", "9", "--speculate", "magic", "--draft-len", "99"]
    with pytest.raises(RequestError) as caught:
        run(demo_engine_directory, *options)
    assert len(caught.value.problems) == 3


def test_token_ids_beyond_the_vocabulary(demo_engine_directory, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"tokens": [1, 99999]}')
    with pytest.raises(RequestError, match="99999"):
        run(demo_engine_directory, "--prompts", tmp_path / "p.jsonl")


@pytest.mark.parametrize(
    "options",
    [
        ["--concurrency", "1,,2"],
        ["--concurrency", "0"],
        ["--concurrency", "x"],
        ["--draft-len", "some"],
        ["--request-rate", "nan"],
        ["--request-rate", "0"],
        ["--rounds", "0"],
        ["--max-tokens", "5"],
        ["--json", "same", "--html", "same"],
    ],
)
def test_wrong_usage(options):
    assert run("/nowhere", *options).exit_code == 2


def test_an_engine_that_is_none(tmp_path: Path):
    with pytest.raises(UserError, match="not an engine"):
        run(tmp_path)
