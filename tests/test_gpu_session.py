# SPDX-License-Identifier: Apache-2.0
"""Sessions on a GPU, with a device of the host and ONNX Runtime in place of compiled graphs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nemo_build.bundle import ENGINE_BUNDLE, read_manifest
from nemo_build.engines import backends
from nemo_build.engines.ort import OrtSession
from nemo_build.engines.session import StepBatch
from nemo_build.errors import BundleError, RequestError
from nemo_build.runtime import Engine, SamplingParams, Scheduling
from nemo_build.state import RECURRENT

from .fake_cuda import HostDevice, HostEngine

TEXT = Path(__file__).read_text()
GREEDY = SamplingParams(max_tokens=12, temperature=0)
SLOTS, CONTEXT = 3, 600


_SLOWLY = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("in place", "decode alone")]


@pytest.fixture(scope="module", params=["doubled", *_SLOWLY])
def demo(request, demo_engine_directory, tmp_path_factory) -> HostEngine:
    """The demo checkpoint, as backends of different kinds have it."""
    doubled = () if request.param == "in place" else RECURRENT
    phases = ("decode",) if request.param == "decode alone" else ("decode", "prefill")
    bundle = demo_engine_directory.parent / "bundle"
    out = tmp_path_factory.mktemp("gpu") / "engine"
    return HostEngine(bundle, out, context=1024, doubled=doubled, phases=phases)


@pytest.fixture
def open_demo(demo, monkeypatch):
    """Opens it on the device of the host."""
    monkeypatch.setitem(backends.BACKENDS, "host", demo.backend())

    def load(**options) -> Engine:
        if (
            not demo.doubled
        ):  # what stands in for its graph for prompts takes no more, as that has two buffers
            options["token_budget"] = 100
        return Engine.load(demo.directory, **options)

    return load


@pytest.fixture(scope="module")
def plain(demo_engine_directory) -> Engine:
    return Engine.load(demo_engine_directory)


def prompts_of(seed: int, count: int, longest: int = 900) -> list[str]:
    """Pieces of this file, of all lengths."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, longest, count)
    return [TEXT[s : s + n] for n, s in zip(sizes, rng.integers(0, len(TEXT) - longest, count), strict=True)]


# --- whole generations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [pytest.param(5, marks=pytest.mark.slow), 40, 1000])
def test_texts_are_those_of_the_cpu(open_demo, plain, chunk):
    prompts = prompts_of(chunk, 6, 500)
    want = plain.generate(prompts, GREEDY)
    assert open_demo().generate(prompts, GREEDY, scheduling=Scheduling(prefill_chunk=chunk)) == want


@pytest.mark.parametrize(
    ("name", "drafts"),
    [
        ("mtp", None),
        ("ngram", 3),
        ("dspark", 4),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("mtp", 7), ("ngram", None), ("dflash", 7))),
    ],
)
def test_speculation_leaves_texts_as_they_are(open_demo, plain, name, drafts):
    prompts = prompts_of(drafts or 0, 4, 300)
    engine = open_demo(speculate=name, draft_length=drafts)
    sampled = SamplingParams(max_tokens=12, temperature=0.8, seed=3)
    for params in (GREEDY, sampled):
        assert engine.generate(prompts, params) == plain.generate(prompts, params)
    assert drafts is None or engine.acceptance.steps > 0


@pytest.mark.parametrize("speculate", ["none", "mtp", pytest.param("dspark", marks=pytest.mark.slow)])
def test_what_the_prefix_cache_kept_is_what_was_computed(open_demo, plain, speculate):
    engine = open_demo(speculate=speculate, prefix_cache=1 << 28)
    common = TEXT[:500]
    prompts = [common + end for end in ("", "a = 1\n", "def f(", "class X:\n    ")]
    for _ in range(2):
        for want, found in zip(
            plain.generate(prompts, GREEDY), engine.generate(prompts, GREEDY), strict=True
        ):
            assert found.token_ids == want.token_ids
    statistics = engine.cache_statistics()
    assert statistics.saved_tokens > 300
    assert statistics.snapshots > 0


def test_preempted_and_cancelled_requests(open_demo, plain):
    engine = open_demo(max_sequences=2, prefix_cache=1 << 28)
    low = engine.stream(prompts_of(1, 2, 300), GREEDY)
    got = [next(low) for _ in range(6)]
    high = engine.generate("import os\n", GREEDY, scheduling=Scheduling(priority=5))
    assert high[0].token_ids == plain.generate("import os\n", GREEDY)[0].token_ids
    got += list(low)
    assert engine.statistics().preemptions > 0
    for i, want in enumerate(plain.generate(prompts_of(1, 2, 300), GREEDY)):
        assert tuple(c.token_id for c in got if c.index == i) == want.token_ids
    closed = engine.stream(prompts_of(2, 3), GREEDY)
    next(closed)
    closed.close()
    assert engine.statistics().free_slots == 2
    assert engine.generate("a", GREEDY)[0].token_ids == plain.generate("a", GREEDY)[0].token_ids


def test_what_such_an_engine_refuses(open_demo):
    with pytest.raises(RequestError, match="keeps 8 tokens of a sequence pending") as caught:
        open_demo(speculate="mtp", draft_length=8)
    assert "at most 7" in caught.value.hint
    with pytest.raises(RequestError, match="memory cannot be given"):
        open_demo(memory=1 << 40)


# --- steps of any kind ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tiny_bundle, tmp_path_factory) -> dict[str, HostEngine]:
    """The random checkpoint, likewise."""
    made = {}
    for name, doubled, phases in (
        ("doubled", RECURRENT, ("decode", "prefill")),
        ("in place", (), ("decode", "prefill")),
        ("decode alone", RECURRENT, ("decode",)),
    ):
        out = tmp_path_factory.mktemp("tiny-gpu") / "engine"
        made[name] = HostEngine(
            tiny_bundle, out, slots=SLOTS, context=CONTEXT, doubled=doubled, phases=phases
        )
    return made


def open_tiny(engine: HostEngine, graph: str = "target", **options):
    manifest = read_manifest(engine.directory, ENGINE_BUNDLE)
    return engine.backend().session(
        engine.directory, manifest, graph, slots=SLOTS, context=CONTEXT, **options
    )


class Walk:
    """Random steps of sequences in slots, which a session of the CPU takes too."""

    def __init__(self, bundle: Path, session, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.session = session
        self.reference = OrtSession(
            bundle / "target.onnx", slots=SLOTS, context=CONTEXT, pending=8, threads=1, hidden=True
        )
        self.past, self.open = [0] * SLOTS, [0] * SLOTS

    def batch(self, widest: int) -> StepBatch:
        """A step of some of the slots, in any order, of tokens as they come; and rows without any."""
        rng = self.rng
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist()
        for slot in slots:
            if rng.random() < 0.1 or self.past[slot] > CONTEXT - 300:
                self.past[slot], self.open[slot] = 0, 0
        accepted = [int(rng.integers(0, self.open[s] + 1)) for s in slots]
        past = [self.past[s] + a for s, a in zip(slots, accepted, strict=True)]
        lengths = [int(rng.integers(0 if len(slots) > 1 else 1, widest + 1)) for _ in slots]
        tokens = [rng.integers(0, 96, n).tolist() for n in lengths]
        batch = StepBatch.of_rows(
            tokens, past=past, slots=slots, accepted=accepted, logits=str(rng.choice(["all", "last", "none"]))
        )
        if len(batch.logit_rows) and rng.random() < 0.5:
            batch = batch.replace(logit_rows=rng.choice(batch.logit_rows, int(rng.integers(1, 5))))
        for slot, n, p in zip(slots, lengths, past, strict=True):
            if n:
                stays = 1 < n <= 8
                self.past[slot], self.open[slot] = (p, n) if stays else (p + n, 0)
        return batch

    def check(self, batch: StepBatch) -> None:
        """Both sessions give the same, wherever it is anybody's."""
        want, found = self.reference.step(batch), self.session.step(batch)
        assert found.logits.shape == want.logits.shape
        np.testing.assert_allclose(found.logits, want.logits, rtol=2e-4, atol=2e-4)
        assert found.hidden.shape == want.hidden.shape
        for row, n in enumerate(batch.lengths.tolist()):
            np.testing.assert_allclose(found.hidden[row, :n], want.hidden[row, :n], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["doubled", "in place", "decode alone"])
@pytest.mark.parametrize(("widest", "steps"), [(1, 30), (8, 40), (40, 15), (290, 6)])
def test_steps_are_those_of_the_cpu(tiny, tiny_bundle, kind, widest, steps):
    if kind == "in place":  # see above
        widest = min(widest, 40)
    walk = Walk(tiny_bundle, open_tiny(tiny[kind], hidden=True), seed=widest)
    for _ in range(steps):
        walk.check(walk.batch(widest))


@pytest.mark.parametrize("kind", ["doubled", "in place"])
def test_steps_of_all_widths_in_turn(tiny, tiny_bundle, kind):
    walk = Walk(tiny_bundle, open_tiny(tiny[kind], hidden=True), seed=7)
    for _ in range(40):
        walk.check(walk.batch(int(walk.rng.choice([1, 1, 2, 8, 9, 17, 60]))))


def test_experts_that_are_given_too_much(tiny, tiny_bundle):
    """Runs that do not count are done again in parts that fit, and nobody notices."""
    engine = tiny["doubled"]
    session = open_tiny(engine, hidden=True)
    runs: list[tuple[str, int]] = []
    for phase in ("decode", "prefill"):
        executor = engine.executors["target", phase]
        inner = executor.run

        def run(bindings, stream, phase=phase, inner=inner):
            runs.append((phase, bindings["input_ids"].shape[0] * bindings["input_ids"].shape[1]))
            inner(bindings, stream)

        executor.run = run
    walk = Walk(tiny_bundle, session, seed=1)
    lengths = [250, 3, 240]
    batch = StepBatch.of_rows(
        [walk.rng.integers(0, 96, n).tolist() for n in lengths], past=[0, 0, 0], slots=[2, 0, 1]
    )
    walk.check(batch)
    assert runs[0] == ("prefill", 750), "all of it at once"
    assert len(runs) >= 5, "too much for an expert"
    follow = StepBatch.of_rows([[1], [2, 3], [4]], past=[250, 2, 240], slots=[2, 0, 1], accepted=[0, 2, 0])
    walk.check(follow)


def test_lean_steps_copy_the_logits_and_nothing_else(tiny):
    session = open_tiny(tiny["in place"], hidden=True)
    device = tiny["in place"].device
    batch = StepBatch.of_rows([[1], [2]], past=[0, 0], slots=[0, 1])
    device.log.clear()
    assert session.step(batch).hidden is not None
    assert device.log == ["write", "run", "read", "read", "wait"]
    device.log.clear()
    found = session.step(batch.replace(lean=True))
    assert found.hidden is None
    assert device.log.count("read") == 1
    assert device.log.count("wait") == 1


def test_outputs_stay_as_they_are(tiny):
    session = open_tiny(tiny["doubled"], hidden=True)
    batch = StepBatch.of_rows([[1, 2], [3]], past=[0, 0], slots=[0, 1], logits="all")
    first = session.step(batch)
    copies = first.logits.copy(), first.hidden.copy()
    session.step(batch.replace(input_ids=np.array([[7, 8], [9, 0]])))
    np.testing.assert_array_equal(first.logits, copies[0])
    np.testing.assert_array_equal(first.hidden, copies[1])


def test_a_batch_that_contradicts_itself(tiny):
    session = open_tiny(tiny["doubled"])
    with pytest.raises(ValueError, match="share a state slot"):
        session.step(StepBatch.of_rows([[1], [2]], past=[0, 0], slots=[1, 1]))


def test_inputs_that_nothing_is_known_of(one):
    manifest = read_manifest(one.directory, ENGINE_BUNDLE)
    manifest["graphs"]["target.prefill"]["inputs"] += ["head.weight", "slots"]
    with pytest.raises(BundleError, match="inputs that this version does not know") as caught:
        one.backend().session(one.directory, manifest, "target", slots=SLOTS, context=CONTEXT)
    assert caught.value.problems == ("head.weight", "slots")


def test_rows_without_tokens_alone(tiny):
    session = open_tiny(tiny["doubled"], hidden=True)
    found = session.step(StepBatch.of_rows([[]], past=[5], slots=[1]))
    assert found.logits.shape == (0, 96)
    assert found.hidden.shape == (1, 1, session.hidden_size)


# --- captured graphs -----------------------------------------------------------------------------------------


@pytest.fixture
def one(tiny_bundle, tmp_path) -> HostEngine:
    """An engine of its own."""
    return HostEngine(tiny_bundle, tmp_path / "engine", slots=SLOTS, context=CONTEXT, doubled=())


def steps_of(session, device: HostDevice, widths: list[int]) -> list[list[str]]:
    """What the device was asked in each of some steps of one sequence."""
    found, past = [], 0
    for n in widths:
        device.log.clear()
        session.step(StepBatch.of_rows([list(range(n))], past=[past], slots=[0]))
        past += n
        found.append([w for w in device.log if w in ("run", "capture", "replay")])
    return found


def test_a_shape_that_is_met_again_is_captured_once_and_replayed(one):
    session = open_tiny(one)
    plain, captured, again = ["run"], ["run", "capture"], ["replay"]
    found = steps_of(session, one.device, [1, 1, 9, 1, 9, 9, 10, 1])
    assert found == [plain, captured, plain, again, captured, again, plain, again]


def test_each_side_of_a_state_has_captures_of_its_own(tiny_bundle, tmp_path):
    engine = HostEngine(tiny_bundle, tmp_path / "engine", slots=SLOTS, context=CONTEXT)
    found = steps_of(open_tiny(engine), engine.device, [1] * 6)
    assert found == [["run"]] * 2 + [["run", "capture"]] * 2 + [["replay"]] * 2


def test_what_cannot_be_captured_is_run(one, tiny_bundle, tmp_path):
    session = open_tiny(one)
    one.device.refuses = True
    with pytest.warns(UserWarning, match="not captured as CUDA graphs"):
        assert steps_of(session, one.device, [1, 1, 1, 1]) == [["run"]] * 4
    other = HostEngine(
        tiny_bundle, tmp_path / "other", slots=SLOTS, context=CONTEXT, doubled=(), capturable=False
    )
    assert steps_of(open_tiny(other), other.device, [1, 1, 1]) == [["run"]] * 3
