# SPDX-License-Identifier: Apache-2.0
"""What checks come to: outcomes, suites, baselines, waivers, and the statistics behind thresholds."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.engines.check.baseline import (
    Baseline,
    Key,
    Measurement,
    Record,
    Waivers,
    expired,
    fingerprint,
    today,
)
from nemo_build.engines.check.checks import check_kinds
from nemo_build.engines.check.plain import plain
from nemo_build.engines.check.run import _waived
from nemo_build.engines.check.statistics import (
    growth_figures,
    paired_interval,
    proportion_fell,
    ratio_interval,
    sign_test,
    wilson_interval,
)
from nemo_build.engines.check.suite import DEFAULT, Suite
from nemo_build.engines.check.verdict import EXIT_CODES, Figure, Result, Status, Verdict, Waiver, worst
from nemo_build.errors import UserError

STATUSES = st.sampled_from(list(Status))
KEY = Key("cpu", "onnxruntime", "01234567", "packed", "bfloat16", "none")
MACHINE = {"processor": "a", "cpus": 2}
TOMORROW = (today() + datetime.timedelta(1)).isoformat()
YESTERDAY = (today() - datetime.timedelta(1)).isoformat()


# --- outcomes ---------------------------------------------------------------------------------------------------


def result(status: Status, name: str = "a", figures: list[Figure] | None = None) -> Result:
    return Result(name, "size", status, "", figures if figures is not None else [Figure("x", status, 1)])


@given(st.lists(STATUSES), st.lists(st.sampled_from(["0", "1", "2"])))
def test_only_what_was_checked_passes(statuses, allowed):
    verdict = Verdict.of([result(s, str(i)) for i, s in enumerate(statuses)], allowed, {})
    counted = [s for i, s in enumerate(statuses) if s is not Status.SKIPPED or str(i) not in allowed]
    if verdict.status is Status.PASS:
        assert set(counted) == {Status.PASS}
    assert verdict.status is not Status.SKIPPED or not {Status.BROKEN, Status.REGRESS} & set(statuses)
    assert (verdict.exit_code == 0) == (verdict.status is Status.PASS)


@given(st.lists(STATUSES, min_size=1))
def test_the_worst_counts(statuses):
    order = [Status.PASS, Status.SKIPPED, Status.REGRESS, Status.BROKEN]
    assert worst(statuses) == max(statuses, key=order.index)
    assert worst([*statuses, Status.BROKEN]) is Status.BROKEN


def test_nothing_checked_is_no_pass():
    assert worst([]) is Status.SKIPPED
    assert Verdict.of([result(Status.SKIPPED)], ["a"], {}).exit_code == 3
    assert Verdict.of([], [], {}).exit_code == 3
    assert list(EXIT_CODES.values()) == [0, 1, 2, 3]


def test_allowed_to_be_skipped():
    results = [result(Status.PASS, "a"), result(Status.SKIPPED, "b")]
    assert Verdict.of(results, [], {}).exit_code == 3
    assert Verdict.of(results, ["b"], {}).exit_code == 0


def test_numbers_that_json_has_not():
    found = Verdict.of(
        [result(Status.PASS, figures=[Figure("x", Status.PASS, math.inf)])], [], {"a": (1, math.nan)}
    )
    text = json.dumps(found.to_json(), allow_nan=False)
    assert '"inf"' in text
    assert '"nan"' in text
    assert plain({"a": (1.0, [-math.inf])}) == {"a": [1.0, ["-inf"]]}


# --- suites -----------------------------------------------------------------------------------------------------


def load(tmp_path, text: str) -> Suite:
    path = tmp_path / "suite.yaml"
    path.write_text(text)
    return Suite.load(path)


def test_default_suite_has_every_kind_but_tasks():
    assert {p.kind for p in Suite.load(DEFAULT).checks} == set(check_kinds()) - {"tasks"}


def test_kinds_keep_their_contract():
    for name, kind in check_kinds().items():
        settings = {f.name for f in dataclasses.fields(kind.Settings)}
        assert name == kind.NAME
        assert set(kind.MEASURED) <= settings
        assert isinstance(kind.NEEDS_BASELINE, bool)
        assert isinstance(kind.HARDWARE, bool)
        for function in ("measure", "judge", "summary"):
            assert callable(getattr(kind, function))
        told = str(kind.Settings.__doc__)
        assert all(f"        {s}: " in told for s in settings), f"{name} does not describe all its settings"


def test_suite(tmp_path):
    suite = load(
        tmp_path,
        "allow_skip: [speed]\nchecks:\n  speed: {batches: [2]}\n"
        "  other: {kind: numerics, kl_mean: 1, max_error: 0.5}\n",
    )
    assert [(p.name, p.kind) for p in suite.checks] == [("speed", "speed"), ("other", "numerics")]
    assert suite.checks[0].settings.batches == (2,)
    assert suite.checks[1].settings.max_error == 0.5
    assert suite.allow_skip == ("speed",)
    assert [p.name for p in suite.only(["other"]).checks] == ["other"]
    with pytest.raises(UserError, match="did you mean other"):
        suite.only(["othr"])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "no YAML"),
        ("[]", "no mapping `checks`"),
        ("checks: {}", "no checks"),
        ("checks: {nummerics: {}}", "did you mean numerics"),
        ("checks: {numerics: {kl_maen: 1}}", "did you mean kl_mean"),
        ("checks: {numerics: {tokens: many}}", "numerics.tokens is 'many'; it must be like 96"),
        ("checks: {numerics: {tokens: true}}", "it must be like 96"),
        ("checks: {acceptance: {every: 1}}", "it must be like True"),
        ("checks: {speed: {batches: 1}}", "it must be like"),
        ("checks: {numerics: []}", "must be a mapping"),
        ("allow_skip: [spede]\nchecks: {speed: {}}", "did you mean speed"),
        ("allow_skip: speed\nchecks: {speed: {}}", "must be a list"),
        ("check: 1\nchecks: {speed: {}}", "no key 'check'"),
    ],
)
def test_bad_suite(tmp_path, text, problem):
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    assert problem in str(error.value)


# --- baselines --------------------------------------------------------------------------------------------------


def record(baseline: Baseline, name: str, hardware: bool, why: str = "first", **found: object) -> None:
    numbers = {k: v for k, v in found.items() if isinstance(v, float)}
    measurement = Measurement(Record({"tokens": 3}, dict(found)), numbers, hardware)
    baseline.write({name: measurement}, {"digest": "d"}, why)


def test_baseline_keeps_what_was_recorded(tmp_path):
    baseline = Baseline(tmp_path / "new", KEY, MACHINE)
    assert baseline.recorded("size", hardware=False) is None
    record(baseline, "size", False, value=1.5, words=["a", "b"])
    record(baseline, "speed", True, "again", value=2.0)
    again = Baseline(tmp_path / "new", KEY, MACHINE)
    assert again.recorded("size", hardware=False) == Record(
        {"tokens": 3}, {"value": 1.5, "words": ["a", "b"]}
    )
    assert again.recorded("size", hardware=True) is None
    assert again.recorded("speed", hardware=True).found == {"value": 2.0}
    assert [e["why"] for e in again.history(hardware=True)] == ["again"]
    assert again.history(hardware=False)[0]["figures"] == {"size.value": 1.5}
    assert again.facts() == {"digest": "d"}


def test_other_checks_stay_and_history_is_short(tmp_path):
    baseline = Baseline(tmp_path, KEY, MACHINE)
    record(baseline, "numerics", False, value=0.0)
    for i in range(30):
        record(baseline, "size", False, f"{i}", value=float(i))
    assert baseline.recorded("numerics", hardware=False).found == {"value": 0.0}
    assert [e["why"] for e in baseline.history(hardware=False)] == [str(i) for i in range(10, 30)]


def test_another_machine_has_another_file(tmp_path):
    record(Baseline(tmp_path, KEY, MACHINE), "speed", True, value=1.0)
    other = Baseline(tmp_path, KEY, {**MACHINE, "cpus": 4})
    assert other.recorded("speed", hardware=True) is None
    assert "cpus there is 2, here 4" in other.unlike()[0]
    assert "processor" not in other.unlike()[0]
    assert Baseline(tmp_path, KEY, MACHINE).unlike() == []
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_another_engine_has_another_file(tmp_path):
    record(Baseline(tmp_path, KEY, MACHINE), "size", False, value=1.0)
    other = Baseline(tmp_path, dataclasses.replace(KEY, weights="int4"), MACHINE)
    assert other.recorded("size", hardware=False) is None
    assert other.others() == [f"{KEY.file}.yaml"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "no YAML"),
        ("[]", "no baseline"),
        ("{format: 1, engine: {}, checks: [], history: []}", "no baseline"),
        ("{format: 9, engine: {}, checks: {}, history: []}", "format 9"),
        ("{format: 1, engine: {}, checks: {size: 1}, history: []}", "no baseline"),
    ],
)
def test_damaged_baseline(tmp_path, text, problem):
    baseline = Baseline(tmp_path, KEY, MACHINE)
    baseline.path(hardware=False).write_text(text)
    with pytest.raises(UserError, match=problem):
        baseline.recorded("size", hardware=False)


@given(st.text(min_size=1))
def test_keys_are_file_names(text):
    name = dataclasses.replace(KEY, target=text).file
    assert "/" not in name
    assert not name.startswith(".")


# --- waivers ----------------------------------------------------------------------------------------------------


def test_waivers(tmp_path):
    waivers = Waivers(tmp_path)
    assert waivers.all() == []
    waivers.add(Waiver("size", TOMORROW, "known"))
    waivers.add(Waiver("speed.x", today().isoformat(), "today counts"))
    waivers.add(Waiver("size", TOMORROW, "better known"))
    assert [(w.name, w.why) for w in waivers.all()] == [("speed.x", "today counts"), ("size", "better known")]
    with pytest.raises(UserError, match="gone by"):
        waivers.add(Waiver("size", YESTERDAY, ""))
    with pytest.raises(UserError, match="no day"):
        waivers.add(Waiver("size", "soon", ""))
    assert not expired(Waiver("a", today().isoformat(), ""))
    assert expired(Waiver("a", YESTERDAY, ""))


@pytest.mark.parametrize(
    "entries", [[{"name": "a"}], ["a"], {"a": 1}, [{"name": "a", "expires": "x", "why": ""}]]
)
def test_damaged_waivers(tmp_path, entries):
    (tmp_path / "waivers.yaml").write_text(yaml.safe_dump(entries))
    with pytest.raises(UserError):
        Waivers(tmp_path).all()


@pytest.mark.parametrize(
    ("name", "expires", "status"),
    [
        ("a", TOMORROW, Status.PASS),
        ("a.x", TOMORROW, Status.PASS),
        ("a.y", TOMORROW, Status.REGRESS),
        ("b", TOMORROW, Status.REGRESS),
        ("a", YESTERDAY, Status.REGRESS),
    ],
)
def test_what_a_waiver_is_good_for(name, expires, status):
    assert _waived(result(Status.REGRESS), [Waiver(name, expires, "because")]).status is status


def test_what_is_broken_cannot_be_waived():
    waiver = Waiver("a", TOMORROW, "because")
    assert _waived(result(Status.BROKEN), [waiver]).status is Status.BROKEN
    assert _waived(result(Status.SKIPPED), [waiver]).status is Status.SKIPPED
    both = [Figure("x", Status.REGRESS, 1), Figure("y", Status.BROKEN, 1)]
    assert _waived(result(Status.BROKEN, figures=both), [waiver]).status is Status.BROKEN


# --- statistics -------------------------------------------------------------------------------------------------


def test_ratio_interval():
    rng = np.random.default_rng(0)
    machine = rng.uniform(1, 4, 60)  # what both suffer from
    before = (machine * rng.normal(1, 0.01, 60)).tolist()
    now = (1.1 * machine * rng.normal(1, 0.01, 60)).tolist()
    ratio, low, high = ratio_interval(before, now, confidence=0.99, paired=True)
    assert low <= ratio <= high
    assert 1.08 < low < 1.1 < high < 1.12
    _, wide_low, wide_high = ratio_interval(before, now, confidence=0.99, paired=False)
    assert wide_high - wide_low > 5 * (high - low)
    assert ratio_interval([2.0] * 9, [2.0] * 9, confidence=0.99, paired=False) == (1, 1, 1)


def test_intervals_hold_what_they_should():
    """Of intervals of 95 % about as many hold the truth."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        _, low, high = paired_interval(rng.normal(0.3, 1, 40).tolist(), confidence=0.95)
        held += low <= 0.3 <= high
    assert 176 <= held <= 200
    assert all(math.isnan(v) for v in paired_interval([0.0, math.nan], confidence=0.9))


def test_proportion_fell():
    assert proportion_fell((50, 100), (50, 100)) == pytest.approx(0.5)
    assert proportion_fell((80, 100), (40, 100)) < 1e-6
    assert proportion_fell((40, 100), (80, 100)) > 0.999
    assert proportion_fell((0, 0), (1, 10)) == 1
    assert proportion_fell((10, 10), (10, 10)) == 1


def test_sign_test_and_wilson():
    from scipy.stats import binomtest

    assert sign_test(0, 0) == 1
    assert sign_test(9, 1) == pytest.approx(binomtest(9, 10, alternative="greater").pvalue)
    assert sign_test(3, 5) == pytest.approx(binomtest(3, 8, alternative="greater").pvalue)
    want = binomtest(7, 20).proportion_ci(0.9, method="wilson")
    assert wilson_interval(7, 20, confidence=0.9) == pytest.approx((want.low, want.high))


def test_growth():
    figures = growth_figures({"a": 103, "b": 101, "c": 5}, {"a": 100, "b": 100, "d": 7}, 0.02, 0)
    assert {f.name: f.status for f in figures} == {
        "a": Status.REGRESS,
        "b": Status.PASS,
        "c": Status.REGRESS,
        "d": Status.PASS,
    }
    assert all(f.status is Status.PASS for f in growth_figures({"a": 103}, {"a": 100}, 0.02, 10))
