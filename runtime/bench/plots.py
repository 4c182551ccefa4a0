# SPDX-License-Identifier: Apache-2.0
"""Plots of a report: their geometry in pixels, which the page's template draws as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_build.runtime.bench.measure import Drafts, StepYield

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, WIDTH - 10, 12, HEIGHT - 40
"""The edges of what the axes enclose, in pixels from the upper left corner."""

_GAP = 0.25  # of a group's width, between groups of bars

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#6f5f90", "#8a8a00", "#555555")
"""After Okabe and Ito: told apart with any colour vision."""

Series = Mapping[str, Sequence[float | None]]
"""Values by the name of what they belong to, one for each label of the horizontal axis."""


@dataclass(frozen=True)
class Dot:
    """A measured point: its place, colour, and what a pointer over it shows."""

    x: float
    y: float
    colour: str
    text: str


@dataclass(frozen=True)
class Bar:
    """A bar: its place and size, colour, and what a pointer over it shows."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    text: str


@dataclass(frozen=True)
class Chart:
    """A plot.

    Attributes:
        title: What it shows.
        x_title: What the horizontal axis is.
        x_labels: Place and text of its labels.
        y_labels: Place and text of the vertical axis's.
        lines: Colour and points (``x,y x,y``) of lines.
        dots: Points of the lines.
        bars: Bars.
    """

    title: str
    x_title: str
    x_labels: list[tuple[float, str]]
    y_labels: list[tuple[float, str]]
    lines: list[tuple[str, str]]
    dots: list[Dot]
    bars: list[Bar]


def charts(report: Mapping[str, Any]) -> list[Chart]:
    """All plots for which the report has figures."""
    speeds = (
        ("Output tokens per second, all sequences", lambda m: m["output_tokens_per_s"]),
        ("Output tokens per second, each sequence", lambda m: m["output_tokens_per_s_per_sequence"]),
        ("Time to first token, median, ms", _latency("ttft_s", "p50")),
        ("Time to first token, 99th percentile, ms", _latency("ttft_s", "p99")),
        ("Time per token, median, ms", _latency("time_per_token_s", "p50")),
        ("Gap between tokens, 99th percentile, ms", _latency("gap_s", "p99")),
    )
    found = [_by_concurrency(report, title, value) for title, value in speeds]
    found += [_by_position(report), _by_category(report)]
    return [c for c in found if c is not None]


def legend(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and colour of every combination of speculator and draft length, the same in all plots."""
    return list(_colours(report).items())


def _colours(report: Mapping[str, Any]) -> dict[str, str]:
    methods = dict.fromkeys(s["method"] for s in report["settings"])
    return {method: COLOURS[i % len(COLOURS)] for i, method in enumerate(methods)}


def _latency(name: str, percentile: str) -> Callable[[Mapping[str, Any]], float | None]:
    """What takes a latency out of a setting's medians, in milliseconds."""

    def value(median: Mapping[str, Any]) -> float | None:
        return None if median[name] is None else 1000 * float(median[name][percentile])

    return value


def _by_concurrency(
    report: Mapping[str, Any], title: str, value: Callable[[Mapping[str, Any]], float | None]
) -> Chart | None:
    """A figure over the number of streams: lines, or bars if there is one number only."""
    streams = list(dict.fromkeys(s["concurrency"] for s in report["settings"]))
    series: dict[str, list[float | None]] = {m: [None] * len(streams) for m in _colours(report)}
    for s in report["settings"]:
        series[s["method"]][streams.index(s["concurrency"])] = value(s["median"])
    draw = line_chart if len(streams) > 1 else bar_chart
    return draw(title, "streams", [str(n) for n in streams], series, _colours(report))


def _by_position(report: Mapping[str, Any]) -> Chart | None:
    rates = {
        method: _drafts([s["acceptance"] for s in report["settings"] if s["method"] == method]).rates
        for method in _colours(report)
    }
    longest = max(map(len, rates.values()), default=0)
    series = {
        method: [None if r is None else 100 * r for r in values] + [None] * (longest - len(values))
        for method, values in rates.items()
    }
    labels = [str(i + 1) for i in range(longest)]
    return line_chart("Drafts accepted, %", "position of the draft", labels, series, _colours(report))


def _by_category(report: Mapping[str, Any]) -> Chart | None:
    categories = list(report["load"]["categories"])
    series = {
        method: [_yield(report, method, category) for category in categories] for method in _colours(report)
    }
    return bar_chart("Tokens per step", "category of the prompt", categories, series, _colours(report))


def _yield(report: Mapping[str, Any], method: str, category: str) -> float | None:
    """Tokens that a step yields, over all numbers of streams."""
    parts = [s["tokens_per_step_by_category"][category] for s in report["settings"] if s["method"] == method]
    return sum((StepYield(p["tokens"], p["steps"]) for p in parts), StepYield()).mean


def _drafts(parts: Sequence[Mapping[str, Any] | None]) -> Drafts:
    """The sum of what several settings found."""
    total = Drafts()
    for part in parts:
        if part is not None:
            total += Drafts(part["steps"], tuple(part["drafted"]), tuple(part["accepted"]))
    return total


def line_chart(
    title: str, x_title: str, labels: Sequence[str], series: Series, colours: Mapping[str, str]
) -> Chart | None:
    """A line for each series over evenly spaced labels; None if there is no value."""
    top = _top(series)
    if top is None:
        return None
    place = [_x((i + 0.5) / len(labels)) for i in range(len(labels))]
    lines, dots = [], []
    for name, values in series.items():
        points = [
            (x, _y(v / top), v, t) for x, v, t in zip(place, values, labels, strict=True) if v is not None
        ]
        lines.append((colours[name], " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in points)))
        dots += [Dot(x, y, colours[name], f"{name}, {x_title} {t}: {v:.4g}") for x, y, v, t in points]
    return Chart(title, x_title, list(zip(place, labels, strict=True)), _y_labels(top), lines, dots, [])


def bar_chart(
    title: str, x_title: str, labels: Sequence[str], series: Series, colours: Mapping[str, str]
) -> Chart | None:
    """A group of bars for each label, a bar for each series that has values; None if none has."""
    top = _top(series)
    if top is None:
        return None
    shown = {name: values for name, values in series.items() if any(v is not None for v in values)}
    group = (RIGHT - LEFT) / len(labels)
    width = group * (1 - _GAP) / len(shown)
    bars = []
    for i, (name, values) in enumerate(shown.items()):
        for j, (value, label) in enumerate(zip(values, labels, strict=True)):
            if value is not None:
                x, y = LEFT + group * (j + _GAP / 2) + width * i, _y(value / top)
                text = f"{name}, {x_title} {label}: {value:.4g}"
                bars.append(Bar(x, y, max(width - 1, 1), _y(0) - y, colours[name], text))
    places = [(_x((i + 0.5) / len(labels)), label) for i, label in enumerate(labels)]
    return Chart(title, x_title, places, _y_labels(top), [], [], bars)


def ticks(largest: float) -> list[float]:
    """Four to ten round numbers (1, 2 or 5 times a power of ten apart) from 0 to at least `largest`, which is > 0."""
    power = 10.0 ** math.floor(math.log10(largest))
    step = next(s for s in (0.2 * power, 0.5 * power, power, 2 * power) if largest / s <= 5)
    return [i * step for i in range(math.ceil(largest / step - 1e-9) + 1)]


def _top(series: Series) -> float | None:
    """Where the vertical axis ends: the tick at or above the largest value; None without values above 0."""
    largest = max((v for values in series.values() for v in values if v is not None), default=0)
    return ticks(largest)[-1] if largest > 0 else None


def _y_labels(top: float) -> list[tuple[float, str]]:
    return [(_y(t / top), f"{t:,.0f}" if top >= 10 else f"{t:.3g}") for t in ticks(top)]


def _x(share: float) -> float:
    return LEFT + share * (RIGHT - LEFT)


def _y(share: float) -> float:
    return BOTTOM - share * (BOTTOM - TOP)
