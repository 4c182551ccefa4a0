# SPDX-License-Identifier: Apache-2.0
"""Rounds that a device takes by itself, on the device of the host: texts and drafts are those of the CPU's engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest, write_manifest
from nemo_build.engines import backends
from nemo_build.engines.gpu.round import Rounds
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.engines.trt.emitter import Emitter
from nemo_build.engines.trt.lowering import HIDDEN_ROWS, LOGITS_SUM, TOKENS, emit_choices
from nemo_build.errors import BundleError
from nemo_build.runtime import Engine, Grammar, SamplingParams, Scheduling, Thinking
from nemo_build.runtime.prefix_cache import PrefixCache
from nemo_build.runtime.request import Request
from nemo_build.runtime.sampling import NonFiniteLogitsError
from nemo_build.runtime.speculation.lengths import DraftLengthController
from nemo_build.state import RECURRENT

from .fake_cuda import HostEngine

TEXT = Path(__file__).with_name("tiny.py").read_text()
GREEDY = SamplingParams(max_tokens=20, temperature=0)
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, seed=3)
SLOTS, CONTEXT = 4, 256

_KINDS = ["doubled", pytest.param("in place", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=_KINDS)
def demo(request, demo_engine_directory, tmp_path_factory) -> HostEngine:
    """The demo checkpoint, as backends of different kinds have it."""
    bundle = demo_engine_directory.parent / "bundle"
    out = tmp_path_factory.mktemp("rounds") / "engine"
    doubled = RECURRENT if request.param == "doubled" else ()
    return HostEngine(bundle, out, slots=SLOTS, context=CONTEXT, doubled=doubled)


class Watch:
    """Notes the rounds that are taken, and what each asks of the device."""

    def __init__(self, engine: HostEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rounds: list[list[str]] = []
        self.drafts: list[list[int]] = []
        self.inside = False
        inner, log = Rounds.run, engine.device.log

        def run(rounds, rows):
            start, self.inside = len(log), True
            found = inner(rounds, rows)
            self.inside = False
            self.rounds.append(log[start:])
            self.drafts.append([r.drafts for r in rows])
            return found

        monkeypatch.setattr(Rounds, "run", run)


@pytest.fixture
def watch(demo, monkeypatch) -> Watch:
    return Watch(demo, monkeypatch)


@pytest.fixture
def open_pair(demo, demo_engine_directory, monkeypatch):
    """Opens the engine on the device of the host and on the CPU, with the same options."""
    monkeypatch.setitem(backends.BACKENDS, "host", demo.backend())

    def load(**options) -> tuple[Engine, Engine]:
        options = {"speculate": "mtp", "max_context": CONTEXT, "token_budget": 100, **options}
        return Engine.load(demo.directory, **options), Engine.load(
            demo_engine_directory, threads=1, **options
        )

    return load


def prompts_of(seed: int, count: int, longest: int = 200) -> list[str]:
    """Pieces of a text, of all lengths."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, count)
    return [TEXT[s : s + n] for n, s in zip(sizes, rng.integers(0, 3000, count), strict=True)]


def mixture(seed: int, count: int = 6) -> tuple[list[str], list[SamplingParams]]:
    """Prompts of which some are sampled for short, so that others decode beside them and by themselves."""
    rng = np.random.default_rng(seed)
    return prompts_of(seed, count), [
        SAMPLED,
        *(SAMPLED if rng.random() < 0.3 else GREEDY for _ in range(count - 1)),
    ]


def check(device: Engine, plain: Engine, prompts: Sequence[str], params: Sequence[SamplingParams]) -> None:
    """Both engines give the same texts, from the same drafts."""
    assert device.generate(prompts, params) == plain.generate(prompts, params)
    assert device.acceptance == plain.acceptance


# --- whole generations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafts", [1, 3, 7, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4, 5, 6))]
)
def test_greedy_texts_and_their_drafts_are_those_of_the_cpu(open_pair, watch, drafts):
    device, plain = open_pair(draft_length=drafts)
    check(device, plain, prompts_of(drafts, 5), [GREEDY] * 5)
    assert max(map(max, watch.drafts)) == drafts
    assert sum(device.acceptance.accepted) > 0


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 8))])
def test_sampled_requests_come_and_go(open_pair, watch, seed):
    device, plain = open_pair(draft_length=3)
    check(device, plain, *mixture(seed))
    assert 0 < len(watch.rounds) < device.statistics().steps, "there were steps of both kinds"


def test_requests_that_need_logits_are_the_hosts(open_pair, watch):
    """Beside them no round is taken; once they have ended, rounds are."""
    device, plain = open_pair(draft_length=3)
    prompts, params = prompts_of(9, 2), SamplingParams(max_tokens=12, temperature=0, logprobs=1)
    for ours, theirs in zip(device.generate(prompts, params), plain.generate(prompts, params), strict=True):
        assert ours.token_ids == theirs.token_ids
        found, expected = ([p.logprob for p in c.logprobs] for c in (ours, theirs))
        np.testing.assert_allclose(found, expected, atol=1e-3)
    schema = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
    params = SamplingParams(max_tokens=12, temperature=0, grammar=schema)
    check(device, plain, prompts, [params] * 2)
    assert not watch.rounds
    closing = SamplingParams(max_tokens=20, temperature=0, thinking=Thinking(3))
    check(device, plain, prompts_of(9, 3), [closing, closing, GREEDY])
    assert watch.rounds, "the budget has no say behind the thinking"


def test_lengths_that_change_from_step_to_step(open_pair, watch, monkeypatch):
    """Steps without drafts are the host's, so what is on the device is fetched, and given back."""
    taken: dict[int, int] = {}

    def choose(controller, rows):
        taken[id(controller)] = taken.get(id(controller), -1) + 1
        return (3, 1, 0, 7, 0, 0, 2, 2)[taken[id(controller)] % 8]

    monkeypatch.setattr(DraftLengthController, "choose", choose)
    monkeypatch.setattr(DraftLengthController, "probing", True)
    monkeypatch.setattr(DraftLengthController, "is_off", False)
    device, plain = open_pair()
    check(device, plain, prompts_of(8, 6), [GREEDY] * 6)
    check(device, plain, *mixture(8))
    assert {max(d) for d in watch.drafts} >= {1, 2, 3, 7}


def test_lengths_that_are_chosen(open_pair):
    """Whether any draft is made is a matter of time."""
    device, plain = open_pair()
    prompts, params = mixture(8)
    assert device.generate(prompts, params) == plain.generate(prompts, params)


def test_a_context_that_is_full(open_pair, watch):
    device, plain = open_pair(draft_length=5)
    params = SamplingParams(max_tokens=400, temperature=0, stop_token_ids=(), ignore_eos=True)
    check(device, plain, [TEXT[:n] for n in (CONTEXT - 20, CONTEXT - 33)], [params] * 2)


def test_what_the_prefix_cache_kept(open_pair, watch):
    """Texts are kept with drafts pending, and gone on from; all of it in rounds and between them."""
    device, plain = open_pair(draft_length=4, prefix_cache=1 << 28)
    first, params = [TEXT[:300], TEXT[300:500], TEXT[40:340]], [GREEDY, SAMPLED, GREEDY]
    check(device, plain, first, params)
    texts = [c.text for c in plain.generate(first, params)]
    device.generate(first, params)
    check(device, plain, [*map(str.__add__, first, texts), *first], [GREEDY] * 6)
    assert device.cache_statistics().saved_tokens > 200
    assert watch.rounds


def test_hidden_states_that_are_saved(open_pair, demo_engine_directory, watch, monkeypatch):
    """They are those of the last committed token, which may be of the last round, the one before, or none."""
    saved, rounds, inner = [], [], PrefixCache.store

    def store(cache, tokens, state, slot, committed, salt=None, extra=None):
        saved.append((tokens[:committed], extra["hidden"].copy()))
        rounds.append(len(watch.rounds))
        return inner(cache, tokens, state, slot, committed, salt, extra)

    monkeypatch.setattr(PrefixCache, "store", store)
    device, _ = open_pair(draft_length=4, prefix_cache=1 << 28)
    for count in range(2, 12):
        device.generate(TEXT[:60], SamplingParams(max_tokens=count, temperature=0))
    assert max(rounds) > 10
    model = demo_engine_directory.parent / "bundle" / "target.onnx"
    reference = OrtSession(model, slots=1, context=CONTEXT, pending=8, threads=1, hidden=True)
    for tokens, hidden in saved:
        want = reference.step(StepBatch.of_rows([tokens], past=[0], slots=[0])).hidden[0, len(tokens) - 1]
        np.testing.assert_allclose(hidden, want, rtol=2e-4, atol=2e-4)


def test_preempted_and_cancelled_requests(open_pair, watch):
    found = []
    for engine in open_pair(draft_length=3, max_sequences=2, prefix_cache=1 << 28):
        low = engine.stream(prompts_of(5, 2, 100), GREEDY)
        chunks = [next(low) for _ in range(5)]
        high = engine.generate("import os\n", GREEDY, scheduling=Scheduling(priority=5))
        chunks += low
        assert engine.statistics().preemptions > 0
        closed = engine.stream(prompts_of(6, 3), GREEDY)
        next(closed)
        closed.close()
        assert engine.statistics().free_slots == 2
        last = engine.generate(prompts_of(7, 3), [GREEDY, SAMPLED, GREEDY])
        found.append(([(c.index, c.token_id, c.drafted) for c in chunks], high, last, engine.acceptance))
    assert found[0] == found[1]
    assert watch.rounds


# --- what is asked of the device -----------------------------------------------------------------------------


def test_the_host_waits_once_a_round_and_fetches_once(open_pair, watch):
    device, _ = open_pair(draft_length=3)
    device.generate(prompts_of(9, 3), GREEDY)
    assert len(watch.rounds) > 8
    for log, drafts in zip(watch.rounds, watch.drafts, strict=True):
        runs = [w for w in log if w in ("run", "replay")]
        assert log.count("wait") == log.count("read") == 1
        assert log[-2:] == ["read", "wait"]
        assert len(runs) == max(drafts) + 1
    settled = watch.rounds[-3]
    assert settled.count("write") == 4, "the integers of each run, and no hidden states"
    assert settled.count("move") == 2 + 3 + 2 * 2, (
        "hidden states to and from, drafts, and what the module feeds itself"
    )


def test_shapes_that_are_met_again_are_replayed(open_pair, watch):
    device, _ = open_pair(draft_length=2)
    device.generate(TEXT[:50], SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    last = watch.rounds[-2]
    assert last.count("replay") == 3
    assert "run" not in last


# --- what is out of the ordinary -----------------------------------------------------------------------------


def run_all(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> list[Request]:
    """Requests that ran to their ends."""
    requests = engine.requests(prompts, params)
    engine.add(requests)
    while not all(r.finished for r in requests):
        engine.step()
    return requests


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_end_their_request_alone(open_pair, demo, watch, monkeypatch, value):
    device, plain = open_pair(draft_length=3)
    executor = demo.executors["target", "decode"]
    inner, poisoned = executor._run, []

    def run(bindings):
        inner(bindings)
        if watch.inside and not poisoned:
            sums = executor._view(bindings[LOGITS_SUM]).reshape(bindings["input_ids"].shape)
            sums[1, 0] = value
            poisoned.append(sums.shape)

    monkeypatch.setattr(executor, "_run", run)
    prompts = ["import os", "def f(", "class A:"]
    found, want = run_all(device, prompts, GREEDY), run_all(plain, prompts, GREEDY)
    assert poisoned[0][0] == 3
    assert [type(r.error) for r in found] == [type(None), NonFiniteLogitsError, type(None)]
    assert [r.tokens for r in found][::2] == [r.tokens for r in want][::2]
    again, want = run_all(device, prompts, GREEDY), run_all(plain, prompts, GREEDY)
    assert [r.tokens for r in again] == [r.tokens for r in want]


def test_logits_behind_a_rejected_draft_matter_to_nobody(open_pair, demo, watch, monkeypatch):
    device, plain = open_pair(draft_length=3)
    executor = demo.executors["target", "decode"]
    inner = executor._run

    def run(bindings):
        inner(bindings)
        if watch.inside:
            ids, tokens = executor._view(bindings["input_ids"]), executor._view(bindings[TOKENS])
            agree = ids[:, 1:] == tokens.reshape(ids.shape)[:, :-1]
            sums = executor._view(bindings[LOGITS_SUM]).reshape(ids.shape)
            sums[:, 1:][~np.logical_and.accumulate(agree, axis=1)] = np.nan

    monkeypatch.setattr(executor, "_run", run)
    check(device, plain, prompts_of(12, 3), [GREEDY] * 3)


def test_an_engine_whose_graphs_do_not_choose(open_pair, demo, watch):
    """It was built earlier: drafts are chosen by the host."""
    manifest = read_manifest(demo.directory, ENGINE_BUNDLE)
    older = {**manifest, "graphs": {name: dict(g) for name, g in manifest["graphs"].items()}}
    for graph in older["graphs"].values():
        graph["outputs"] = [n for n in graph["outputs"] if n not in (TOKENS, LOGITS_SUM, HIDDEN_ROWS)]
    write_manifest(demo.directory, ENGINE_BUNDLE, older)
    try:
        device, plain = open_pair(draft_length=2)
        check(device, plain, prompts_of(13, 2), [GREEDY] * 2)
    finally:
        write_manifest(demo.directory, ENGINE_BUNDLE, manifest)
    assert not watch.rounds


def test_a_step_that_fails_within_a_round(open_pair, demo, watch, monkeypatch):
    device, plain = open_pair(draft_length=3)
    executor = demo.executors["mtp", "decode"]
    inner, failed = executor._run, []

    def run(bindings):
        if len(watch.rounds) == 2 and not failed:
            failed.append(True)
            raise RuntimeError("the device failed")
        inner(bindings)

    monkeypatch.setattr(executor, "_run", run)
    prompts = prompts_of(14, 3)
    with pytest.raises(BundleError, match="the device failed"):
        device.generate(prompts, GREEDY)
    assert failed
    assert device.statistics().free_slots == SLOTS
    assert device.generate(prompts, GREEDY) == plain.generate(prompts, GREEDY)


# --- what graphs choose --------------------------------------------------------------------------------------


def test_what_graphs_choose():
    """The first of the largest, a finite sum only of finite logits, and never an id that there is not."""
    g, made = Emitter(), onnx.helper.make_tensor_value_info
    inputs = [
        made("x", onnx.TensorProto.FLOAT, ["rows", 5]),
        made("h", onnx.TensorProto.FLOAT, ["batch", "steps", 2]),
        made("logit_rows", onnx.TensorProto.INT64, ["rows"]),
    ]
    outputs = [
        made("logits", onnx.TensorProto.FLOAT, ["rows", 5]),
        made("hidden", onnx.TensorProto.FLOAT, ["batch", "steps", 2]),
    ]
    g.op("Identity", "x", out="logits")
    g.op("Identity", "h", out="hidden")
    found = emit_choices(g, outputs, feeds_itself=True)
    graph = onnx.helper.make_graph(g.nodes, "choices", inputs, found, g.constants)
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 21)])
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    logits = np.array([[1, 3, 3, 2, 0], [np.nan] * 5, [0, np.inf, 1, 2, 3], [-2, -9, -1, -1, -4]], np.float32)
    hidden = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    feeds = {"x": logits, "h": hidden, "logit_rows": np.array([0, 5, 3, 3])}
    tokens, sums, rows = session.run([TOKENS, LOGITS_SUM, HIDDEN_ROWS], feeds)
    assert tokens[[0, 2, 3]].tolist() == [1, 1, 2]
    assert 0 <= tokens[1] < 5
    assert np.isfinite(sums).tolist() == [True, False, False, True]
    np.testing.assert_array_equal(rows, hidden.reshape(6, 2)[[0, 5, 3, 3]])
    assert emit_choices(g, outputs[1:], feeds_itself=True) == []
