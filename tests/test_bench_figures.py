# SPDX-License-Identifier: Apache-2.0
"""What a measurement computes and shows: statistics by hand, plots, tables, files."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_build.bundle import publish_file
from nemo_build.errors import UserError
from nemo_build.runtime.bench.measure import (
    Drafts,
    StepYield,
    medians,
    processor_wait,
    spread,
    statistics,
    step_yields,
    thread_seconds,
)
from nemo_build.runtime.bench.plots import HEIGHT, WIDTH, bar_chart, line_chart, ticks
from nemo_build.runtime.bench.report import check_writable, columns, number

from .bench_traces import CATEGORIES, trace


def test_spread_by_hand():
    """Of 1..5: the 90th percentile is 0.6 of the way from 4 to 5, the 99th 0.96."""
    assert spread([5, 1, 4, 2, 3]) == pytest.approx({"mean": 3, "p50": 3, "p90": 4.6, "p99": 4.96, "max": 5})
    assert spread([]) is None


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_spread_is_ordered_and_within(values):
    found = spread(values)
    assert found is not None
    ordered = [min(values), found["p50"], found["p90"], found["p99"], max(values)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(ordered))


def test_statistics_by_hand():
    """Two requests: one of 4 and 3 tokens from second 0, one of 8 and 2 tokens from second 2."""
    found = statistics([trace(0, [1, 2, 4], prompt=4), trace(2, [4, 5], prompt=8)])
    assert (found["requests"], found["seconds"]) == (2, 5)
    assert (found["prompt_tokens"], found["output_tokens"]) == (12, 5)
    assert found["ttft_s"]["mean"] == 1.5
    assert found["ttft_s"]["p50"] == 1.5
    assert found["time_per_token_s"]["mean"] == 1.25  # 3 s for 2 tokens, 1 s for 1
    assert found["gap_s"] == pytest.approx({"mean": 4 / 3, "p50": 1, "p90": 1.8, "p99": 1.98, "max": 2})
    assert found["output_tokens_per_s"] == 1
    assert found["output_tokens_per_s_per_sequence"] == pytest.approx((1 / 1.5 + 1) / 2)
    assert found["prompt_tokens_per_s"] == pytest.approx(12 / 5)
    assert found["prompt_tokens_per_s_per_sequence"] == 4
    assert found["requests_per_s"] == pytest.approx(0.4)


def test_statistics_of_single_tokens():
    found = statistics([trace(0, [1])])
    assert found["time_per_token_s"] is None
    assert found["gap_s"] is None
    assert found["output_tokens_per_s_per_sequence"] is None
    assert found["output_tokens_per_s"] == 1


def test_tokens_of_one_step_have_no_gap():
    """Three tokens at once, twice: the time per token is a third of a step, most gaps are none."""
    found = statistics([trace(0, [1, 2, 2, 2, 5, 5, 5])])
    assert found["time_per_token_s"]["p50"] == pytest.approx(4 / 6)
    assert found["gap_s"]["p50"] == 0
    assert found["gap_s"]["mean"] == pytest.approx(4 / 6)


def test_medians_by_hand():
    rounds = [
        {"a": 1.0, "b": {"x": 3.0}, "c": None},
        {"a": 5.0, "b": None, "c": None},
        {"a": 2.0, "b": {"x": 1.0}, "c": None},
    ]
    assert medians(rounds) == {"a": 2, "b": {"x": 2}, "c": None}


def test_drafts():
    before, after = Drafts(2, (2, 1), (1, 1)), Drafts(4, (4, 3, 1), (3, 2, 0))
    part = after - before
    assert part == Drafts(2, (2, 2, 1), (2, 1, 0))
    assert part.length == 2.5
    assert part.rates == [1, 0.5, 0]
    assert before + part == after
    assert Drafts().length is None
    assert Drafts(0, (0,), (0,)).rates == [None]
    counted = SimpleNamespace(steps=1, drafted=[1], accepted=[0])
    snapshot = Drafts.of(counted)
    counted.drafted[0] = 9
    assert snapshot.drafted == (1,)


def test_processor_wait():
    """Of 3 more seconds, one was spent waiting."""
    assert processor_wait((1, 1), (3, 2)) == pytest.approx(1 / 3)
    assert processor_wait((1, 1), (1, 1)) is None
    assert processor_wait(None, (1, 1)) is None
    found = thread_seconds()
    assert found is None or (found[0] > 0 and found[1] >= 0)


@given(
    st.lists(st.tuples(st.sampled_from(CATEGORIES), st.lists(st.integers(0, 4), max_size=6)), max_size=6),
    st.booleans(),
)
def test_step_yields(steps_of_sequences, cut):
    """Flags of whole steps, the last one perhaps cut behind its drafts, give tokens and steps again."""
    traces, tokens, steps = [], dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
    for category, accepted in steps_of_sequences:
        flags = "." + "".join("d" * n + "." for n in accepted)
        if cut and accepted and accepted[-1]:
            flags = flags[:-1]
        traces.append(trace(0, list(range(1, len(flags) + 1)), flags, category=category))
        tokens[category] += len(flags) - 1
        steps[category] += len(accepted)
    found = step_yields(traces)
    for category, part in found.items():
        assert (part.tokens, part.steps) == (tokens[category], steps[category])
    assert StepYield(6, 3).mean == 2
    assert StepYield().mean is None


@given(st.floats(1e-6, 1e9))
def test_ticks_are_round_and_reach_the_largest(largest):
    found = ticks(largest)
    assert found[0] == 0
    assert found[-1] >= largest * (1 - 1e-9)
    assert found[-2] < largest
    assert 3 <= len(found) <= 7


def test_charts_stay_inside_and_leave_gaps():
    colours = {"a": "#000", "b": "#111"}
    series = {"a": [1.0, None, 30.0], "b": [None, None, None]}
    lines = line_chart("t", "x", ["1", "2", "3"], series, colours)
    bars = bar_chart("t", "x", ["1", "2", "3"], series, colours)
    assert lines is not None
    assert bars is not None
    assert (len(lines.dots), len(bars.bars)) == (2, 2)
    assert all(0 <= d.x <= WIDTH and 0 <= d.y <= HEIGHT for d in lines.dots)
    assert all(b.x + b.width <= WIDTH and b.y >= 0 and b.height >= 0 for b in bars.bars)
    assert bars.bars[1].height == pytest.approx(30 * bars.bars[0].height)
    assert line_chart("t", "x", ["1"], {"a": [None]}, colours) is None
    assert bar_chart("t", "x", ["1"], {"a": [0.0]}, colours) is None


def test_numbers_and_columns():
    assert [number(v) for v in (None, 0.123, 12.34, 123.4, 12345.6)] == ["-", "0.12", "12.3", "123", "12,346"]
    assert columns([("name", "n"), ("a", "10"), ("bcd", "-")]) == "name   n\na     10\nbcd    -"


def test_files_are_whole_or_absent(tmp_path):
    path = tmp_path / "report"
    with pytest.raises(UnicodeEncodeError):
        publish_file(path, "\ud800")
    assert list(tmp_path.iterdir()) == []
    publish_file(path, "one")
    publish_file(path, "two")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["two"]
    check_writable(path)
    for wrong in (tmp_path, tmp_path / "no" / "file"):
        with pytest.raises(UserError):
            check_writable(wrong)
