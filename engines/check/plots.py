# SPDX-License-Identifier: Apache-2.0
"""The plots of a report's page; their geometry is that of the benchmark's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_build.runtime.bench.plots import COLOURS, Chart, bar_chart, line_chart

_BINS = 12
_MOST_LABELS = 12
_HISTORIES = 12
"""Figures whose history is shown."""


def charts(report: Mapping[str, Any]) -> list[Chart]:
    """All plots for which the report has data."""
    found: list[Chart | None] = []
    for result in report["results"]:
        make = _BY_KIND.get(result["kind"])
        if make is not None and result["details"]:
            found += make(result["check"], result["details"])
    return [c for c in [*found, *_history(report)] if c is not None]


def _numerics(name: str, details: Mapping[str, Any]) -> list[Chart | None]:
    values = [v for v in details.get("divergence", ()) if isinstance(v, (int, float))]
    layers = [
        _lines(
            f"{name}: error of each layer against {what}",
            "layer",
            _labels(_numbers(errors)),
            {"error": errors},
        )
        for what, key in (("the baseline", "layers"), ("the reference", "reference layers"))
        if (errors := list(details.get(key, {}).values()))
    ]
    return [_histogram(f"{name}: positions by divergence, nats", values), *layers]


def _quality(name: str, details: Mapping[str, Any]) -> list[Chart | None]:
    sides = {"recorded": details.get("before", []), "now": details.get("now", [])}
    labels = [str(i + 1) for i in range(len(sides["now"]))]
    return [_lines(f"{name}: loss of each document, nats a token", "document", _labels(labels), sides)]


def _acceptance(name: str, details: Mapping[str, Any]) -> list[Chart | None]:
    found = []
    for speculator, counts in details.get("now", {}).items():
        sides = {"recorded": details["before"].get(speculator, counts), "now": counts}
        rates = {
            side: [100 * a / d if d else None for a, d in zip(c["accepted"], c["drafted"], strict=True)]
            for side, c in sides.items()
        }
        labels = [str(i + 1) for i in range(max(map(len, rates.values())))]
        title = f"{name}: drafts of {speculator} accepted, %"
        found.append(_lines(title, "position of the draft", labels, rates))
    return found


def _speed(name: str, details: Mapping[str, Any]) -> list[Chart | None]:
    before, now = details.get("before", {}), details.get("now", {})
    names = [n for n in now if n in before and not n.startswith("tokens/s")]
    ratios = [100 * float(np.median(now[n]) / np.median(before[n])) for n in names]
    title = f"{name}: time of each figure, % of what it is compared with"
    return [_bars(title, "figure, in the table's order", _numbers(names), {"now": ratios})]


def _size(name: str, details: Mapping[str, Any]) -> list[Chart | None]:
    names = [n for n in details.get("now", {}) if n.startswith("weights in ")]
    sides = {
        "recorded": [details["before"].get(n, 0) / 1e6 for n in names],
        "now": [details["now"][n] / 1e6 for n in names],
    }
    labels = [n.removeprefix("weights in ") for n in names]
    return [_bars(f"{name}: weights by format, MB", "format", labels, sides)] if names else []


_BY_KIND = {
    "numerics": _numerics,
    "quality": _quality,
    "acceptance": _acceptance,
    "speed": _speed,
    "size": _size,
}


def _history(report: Mapping[str, Any]) -> list[Chart | None]:
    """A figure over what was recorded of it, from the oldest entry to the newest."""
    entries = report["facts"]["baseline"]["history"]
    names = list(dict.fromkeys(n for e in entries for n in e["figures"]))
    found: list[Chart | None] = []
    for name in names:
        points = [(e["date"], e["figures"][name]) for e in entries if name in e["figures"]]
        if len(points) > 1 and len(found) < _HISTORIES:
            labels, values = [d for d, _ in points], [v for _, v in points]
            found.append(_lines(f"history of {name}", "recorded", _labels(labels), {"recorded": values}))
    return found


def _histogram(title: str, values: Sequence[float]) -> Chart | None:
    if not values or not max(values) > 0:
        return None
    counts, edges = np.histogram(values, bins=_BINS)
    labels = _labels([f"{e:.1e}" for e in edges[:-1]], most=4)
    return _bars(title, "from", labels, {"now": [float(c) for c in counts]})


def _lines(
    title: str, x_title: str, labels: Sequence[str], series: Mapping[str, Sequence[Any]]
) -> Chart | None:
    return line_chart(title, x_title, labels, _drawn(series, len(labels)), _SERIES)


def _bars(
    title: str, x_title: str, labels: Sequence[str], series: Mapping[str, Sequence[Any]]
) -> Chart | None:
    return bar_chart(title, x_title, labels, _drawn(series, len(labels)), _SERIES)


def _drawn(series: Mapping[str, Sequence[Any]], length: int) -> dict[str, list[float | None]]:
    """Values that can be drawn, as many as there are labels."""
    numbers = {
        n: [v if isinstance(v, (int, float)) else None for v in values] for n, values in series.items()
    }
    return {name: (values + [None] * length)[:length] for name, values in numbers.items()}


_SERIES = {"recorded": COLOURS[8], "now": COLOURS[0], "error": COLOURS[0]}


def _numbers(values: Sequence[Any]) -> list[str]:
    return [str(i) for i in range(len(values))]


def _labels(labels: Sequence[str], most: int = _MOST_LABELS) -> list[str]:
    """The labels for which there is room, and empty ones between them."""
    step = -(-len(labels) // most) if labels else 1
    return [label if i % step == 0 else "" for i, label in enumerate(labels)]
