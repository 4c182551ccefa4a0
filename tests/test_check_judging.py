# SPDX-License-Identifier: Apache-2.0
"""How each kind of check judges what was measured, and what it says it comes from."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.engines.check.causes import Changes
from nemo_build.engines.check.checks import check_kinds
from nemo_build.engines.check.checks import numerics as numerics_check
from nemo_build.engines.check.verdict import Status


def judged(kind: str, now: dict, before: dict | None = None, **settings: object) -> dict[str, Status]:
    module = check_kinds()[kind]
    found = module.judge(now, before, module.Settings(**settings))
    return {f.name: f.status for f in found.figures}


def position(logits: np.ndarray) -> dict:
    logs = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-logs)[:4]
    return {
        "at": "0:1",
        "tokens": best.tolist(),
        "logprobs": logs[best].tolist(),
        "sample": logs[[0, 3, 7]].tolist(),
    }


@given(st.integers(0, 2**32 - 1), st.floats(0, 2))
def test_the_recorded_divergence_is_a_lower_bound(seed, size):
    rng = np.random.default_rng(seed)
    a = rng.normal(0, 2, 12)
    b = a + size * rng.normal(0, 1, 12)
    p, q = (np.exp(v) / np.exp(v).sum() for v in (a, b))
    true = float((p * np.log(p / q)).sum())
    found = numerics_check._divergence(position(a), position(b))
    assert -1e-9 <= found <= true + 1e-9
    assert numerics_check._divergence(position(a), position(a)) == 0


def test_what_is_not_a_number_is_no_pass():
    good = position(np.arange(12.0))
    bad = {**good, "logprobs": ["nan"] * 4, "sample": ["nan"] * 3}
    status = judged("numerics", {"positions": [bad]}, {"positions": [good]})
    assert {"kl_mean", "kl_p99", "cosine", "max_error"} <= {
        n for n, s in status.items() if s is Status.REGRESS
    }
    assert judged("quality", {"losses": [1.0, "nan"]}, {"losses": [1.0, 1.0]}) == {
        "perplexity": Status.REGRESS
    }


def test_the_layer_where_the_error_begins():
    good = {"positions": [position(np.arange(12.0))], "layers": {f"l{i}": [1.0, 2.0] for i in range(4)}}
    bad = {**good, "layers": {"l0": [1.0, 2.0], "l1": [1.0, 2.005], "l2": [1.0, 2.006], "l3": [1.0, 2.05]}}
    module = check_kinds()["numerics"]
    found = module.judge(bad, good, module.Settings())
    assert found.where == "l1"
    assert found.causes[0].startswith("the error begins at l1")
    assert "l3" in found.causes[0]


def test_more_tokens_a_second_are_better():
    times = [1.0, 1.01, 0.99] * 5
    rates = [100.0, 101.0, 99.0] * 5
    before = {"now": {"first token s at 1": times, "tokens/s at 1": rates}}
    slow = {"now": {"first token s at 1": [2 * t for t in times], "tokens/s at 1": [r / 2 for r in rates]}}
    fast = {"now": {"first token s at 1": [t / 2 for t in times], "tokens/s at 1": [2 * r for r in rates]}}
    assert set(judged("speed", slow, before).values()) == {Status.REGRESS}
    assert set(judged("speed", fast, before).values()) == {Status.PASS}
    assert set(judged("speed", {"now": slow["now"], "before": before["now"]}, fast).values()) == {
        Status.REGRESS
    }


def test_acceptance_falls_by_more_than_chance():
    def counts(accepted: int) -> dict:
        return {
            "mtp": {
                "steps": 500,
                "drafted": [500, 500],
                "accepted": [accepted, accepted // 2],
                "texts": ["1"],
            }
        }

    assert Status.REGRESS in judged("acceptance", counts(300), counts(400)).values()
    assert set(judged("acceptance", counts(400), counts(300)).values()) == {Status.PASS}
    few = {"mtp": {"steps": 10, "drafted": [10], "accepted": [6], "texts": ["1"]}}
    was = {"mtp": {"steps": 10, "drafted": [10], "accepted": [8], "texts": ["1"]}}
    assert set(judged("acceptance", few, was).values()) == {Status.PASS}
    assert judged("acceptance", few, few, floor=2.0)["mtp length"] is Status.REGRESS
    assert judged("acceptance", {}, was) == {"mtp length": Status.REGRESS}


def accepted(**texts: list[str] | None) -> dict:
    counts = {"steps": 10, "drafted": [10], "accepted": [6]}
    return {name: counts | ({} if t is None else {"texts": t}) for name, t in texts.items()}


def test_drafts_are_accepted_at_the_same_tokens():
    def found(now: list[str], was: list[str] | None) -> Status:
        return judged("acceptance", accepted(mtp=now), accepted(mtp=was))["mtp same tokens"]

    was = ["1 2* 3* 4 5*"] * 20
    assert found(was, was) is Status.PASS
    assert found([*was[1:], "1 2* 3 4* 5"], was) is Status.PASS  # 97 of 100
    assert found([*was[3:], *["1 2* 3 4* 5"] * 3], was) is Status.REGRESS
    assert (
        found(["1 7* 3 4* 5"] * 20, was) is Status.PASS
    )  # the target's text is another, from the second token
    assert found(["1* 7 3 4* 5"] * 20, was) is Status.REGRESS
    assert found(was, None) is Status.SKIPPED


def test_causes_tell_drafters_from_what_they_are_fed():
    module = check_kinds()["acceptance"]

    def causes(*fell: str) -> list[str]:
        was = accepted(dflash=["1"], dspark=["1"], mtp=["1"], ngram=["1"])
        now = was | accepted(**{name: ["1*"] for name in fell})
        return module.judge(now, was, module.Settings()).causes

    assert causes() == []
    assert causes("dflash", "dspark") == ["dflash, dspark: the taps that all of them are fed changed"]
    assert causes("dflash") == ["dflash: the drafter, or the taps that it is fed, changed"]
    assert causes("mtp", "ngram") == [
        "ngram: the texts that it drafts from changed, or how it does",
        "mtp: the drafter, or the hidden states that it is fed, changed",
    ]


def test_tasks_are_compared_sample_by_sample():
    assert judged("tasks", {"a": "1" * 80 + "0" * 20}, {"a": "1" * 100}) == {"a": Status.REGRESS}
    assert judged("tasks", {"a": "1" * 98 + "0" * 2}, {"a": "1" * 100}) == {"a": Status.PASS}
    assert judged("tasks", {"a": "10" * 50}, {"a": "01" * 50}) == {"a": Status.PASS}
    assert judged("tasks", {"a": "1"}, {"a": "11"}) == {"a": Status.BROKEN}
    assert judged("tasks", {"a": "1"}, {"a": "1", "b": "1"})["b"] is Status.BROKEN


def test_structure_allows_what_it_is_told():
    now = {"tensors": {"a": "bf16 [2] 11", "b": "bf16 [2] 22"}, "versions": {"x": 1}}
    before = {"tensors": {"a": "bf16 [2] 10", "b": "bf16 [2] 22"}, "versions": {"x": 0}}
    assert judged("structure", now, before)["tensors/a"] is Status.REGRESS
    assert set(judged("structure", now, before, contents=False).values()) == {Status.PASS}
    assert set(judged("structure", now, before, allow=("versions/*", "tensors/a")).values()) == {Status.PASS}
    assert (
        judged("structure", now, before, allow=("versions/*", "tensors/zz*"))["tensors/zz*"] is Status.BROKEN
    )


def test_causes_put_the_layer_that_differs_first():
    from nemo_build.engines.check.causes import Change

    changes = Changes(
        (
            Change("wiring", "target/l1", "one"),
            Change("tensors", "l10.w", "ten"),
            Change("tensors", "l3.w", "three"),
        ),
        True,
    )
    assert changes.likely("numerics", "l3") == ["three", "one", "ten"]
    assert changes.likely("numerics", "l1")[0] == "one"
    assert changes.likely("provenance") == ["ten", "three"]


def test_words_for_changes_of_weights():
    from nemo_build.engines.check.causes import _text
    from nemo_build.engines.check.structure import form_of

    assert form_of("bf16 [2, 3] abc") == form_of("bf16 [2, 3]") == "bf16 [2, 3]"
    assert form_of("abc") == ""
    assert _text("tensors", "w", "bf16 [2, 3] abc", "bf16 [2, 3] abd") == "the weights of w changed"
    assert _text("tensors", "w", "bf16 [2, 3]", "int4 [2, 3]") == "w was bf16 [2, 3], is int4 [2, 3]"
    assert _text("tensors", "weights.bin", "abc", "abd") == "the weights of weights.bin changed"
    assert _text("options", "w", None, 1) == "options: w is new (1)"
    assert _text("options", "w", 1, None) == "options: w is gone (was 1)"


def test_near_ties(monkeypatch):
    from nemo_build.engines.check.checks import behaviour

    logits = np.array([[0.0, 1.0, 1.05, 3.0]])
    fed = []
    monkeypatch.setattr(behaviour, "logits_of", lambda session, tokens: fed.append(tokens) or logits)

    class Subject:
        def engine(self) -> Subject:
            return self

        session = None

    assert behaviour._is_tie(Subject(), [7], [5, 1, 3], [5, 2, 0], 0.1)
    assert fed == [[7, 5]]
    assert not behaviour._is_tie(Subject(), [7], [5, 1], [5, 3], 0.1)
    assert not behaviour._is_tie(Subject(), [7], [5, 1], [5], 0.1)
    assert not behaviour._is_tie(Subject(), [7], [5, 1, 3], [5, 2, 0], 0.0)


def test_what_seems_slower_must_be_slower_again():
    name, slow, fast = "between tokens s at 1x32", [1.2, 1.21, 1.19] * 5, [1.0, 1.01, 0.99] * 5
    first = {"now": {name: slow}, "before": {name: fast}}
    again = {"again": {"now": {name: 2 * slow}, "before": {name: 2 * fast}}}
    once = {"again": {"now": {name: 2 * fast}, "before": {name: 2 * fast}}}
    assert judged("speed", first) == judged("speed", first | again) == {name: Status.REGRESS}
    assert judged("speed", first | once) == {name: Status.PASS}
    module = check_kinds()["speed"]
    (figure,) = module.judge(first | once, None, module.Settings()).figures
    assert figure.note.startswith("1.200 of the time")
    assert "timed again with engines loaded anew 1.000 of the time" in figure.note


def test_only_the_cases_that_seem_slower_are_timed_again(monkeypatch, tmp_path):
    from nemo_build.engines.check.checks import speed

    timed: list[str] = []

    def time_case(engines, case, effort, more, found) -> None:
        timed.append(f"{case.figure('tokens/s')} {effort.rounds}")
        for side, value in (("now", 1.0), ("before", 2.0)):
            for figure in sorted(case.figures):
                slow = (case.mode, case.context) == (" with mtp", 32) and figure.startswith("tokens/s")
                speed.add(found, side, figure, value if slow else 1.0)

    class Subject:
        path, before, reference, speculator = tmp_path, tmp_path, None, "mtp"

        def engine(self) -> None:
            pass

    monkeypatch.setattr(speed, "time_case", time_case)
    monkeypatch.setattr(speed, "load", lambda path, options: None)
    monkeypatch.setattr(speed.Case, "fits", lambda case, engines: True)
    monkeypatch.setattr(speed, "time_opening", lambda *_: None)
    found = speed.measure(Subject(), speed.Settings(batches=(1,)))
    where = "tokens/s with mtp at 1x32"
    assert timed[-1] == f"{where} 40"
    assert len(timed) == 5
    assert found["again"]["now"][where] == [1.0]
    assert judged("speed", found)[where] is Status.REGRESS
