# SPDX-License-Identifier: Apache-2.0
"""The result of a measurement: plain data, tables for a terminal, one self-contained page for a browser."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nemo_build
from nemo_build.bundle import ENGINE_BUNDLE, sha256_file, sha256_json
from nemo_build.engines.doctor import diagnose
from nemo_build.errors import UserError
from nemo_build.runtime.bench.measure import Drafts, StepYield
from nemo_build.runtime.bench.prompts import DEFAULT_PROMPTS
from nemo_build.runtime.bench.run import NONE, Bench, GreedyCheck, Results
from nemo_build.settings import threads as default_threads

_TEMPLATES = Path(__file__).parent

NOTABLE_WAIT = 0.05
"""Share of their time that threads wait for a processor from which on the report says so."""

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "ignore_eos",
)


def build_report(bench: Bench, results: Results) -> dict[str, Any]:
    """The report as plain data; docs/bench.md says what each field means."""
    plain = {
        s.concurrency: m.median["output_tokens_per_s"]
        for s, m in results.measured.items()
        if s.speculator == NONE
    }
    settings = []
    for setting, measured in results.measured.items():
        median = measured.median
        base, speed = plain.get(setting.concurrency), median["output_tokens_per_s"]
        settings.append(
            {
                "concurrency": setting.concurrency,
                "speculator": setting.speculator,
                "draft_length": int(setting.drafts) if setting.drafts.isdecimal() else setting.drafts or None,
                "method": setting.method,
                "median": median,
                "ratio_to_none": speed / base if base and speed else None,
                "acceptance": measured.drafts.to_json() if measured.drafts.steps else None,
                "tokens_per_step": sum(measured.yields.values(), StepYield()).to_json(),
                "tokens_per_step_by_category": {c: y.to_json() for c, y in measured.yields.items()},
                "rounds": measured.rounds,
            }
        )
    return {
        "nemo_build": nemo_build.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "interrupted": results.interrupted,
        "engine": _engine_facts(bench),
        "machine": _machine_facts(bench),
        "load": _load_facts(bench),
        "settings": settings,
        "check": None if results.check is None else _check_json(results.check),
    }


def _engine_facts(bench: Bench) -> dict[str, Any]:
    manifest = bench.manifest
    return {
        "name": bench.directory.resolve().name,
        "digest": sha256_file(bench.directory / ENGINE_BUNDLE),
        "architecture": manifest["spec"]["architecture"],
        "target": manifest["target"],
        "backend": f"{manifest['backend']['name']} {manifest['backend']['version']}",
        "options": manifest["options"],
    }


def _machine_facts(bench: Bench) -> dict[str, Any]:
    found = diagnose()
    threads = bench.options.threads
    return {
        "cpu": found.cpu,
        "kernels": found.kernels,
        "threads": default_threads() if threads is None else threads,
        "memory": found.memory,
        "gpus": list(found.gpus),
    }


def _load_facts(bench: Bench) -> dict[str, Any]:
    options = bench.options
    categories: dict[str, int] = {}
    for request in bench.requests:
        categories[request.category] = categories.get(request.category, 0) + 1
    return {
        "requests": len(bench.requests),
        "categories": categories,
        "distinct_prompts": bench.distinct_prompts,
        "wrapped_prompts": bench.wrapped,
        "prompts": "shipped" if options.prompts == DEFAULT_PROMPTS else options.prompts.name,
        "prompts_digest": sha256_json([list(r.tokens) for r in bench.requests]),
        "input_length": options.input_length,
        "output_length": options.output_length,
        "request_rate": options.rate,
        "warm_up": options.warm_up,
        "rounds": options.rounds,
        "sampling": {name: getattr(bench.params, name) for name in _SAMPLING},
    }


def _check_json(check: GreedyCheck) -> dict[str, Any]:
    return {
        "compared": check.compared,
        "equal": not check.differences if check.compared else None,
        "differences": [
            {
                "method": d.setting.method,
                "concurrency": d.setting.concurrency,
                "request": d.request,
                "token": d.position,
            }
            for d in check.differences
        ],
    }


def report_text(report: Mapping[str, Any]) -> str:
    """The report for a terminal: what was measured, speeds, acceptance, the check."""
    parts = ["\n".join(facts(report))]
    if report["settings"]:
        parts.append(columns(speed_rows(report)))
    if len(rows := acceptance_rows(report)) > 1:
        parts.append("Acceptance of drafts\n" + columns(rows))
    return "\n\n".join([*parts, check_text(report)])


def facts(report: Mapping[str, Any]) -> list[str]:
    """What the figures belong to, in lines."""
    engine, machine, load = report["engine"], report["machine"], report["load"]
    options, sampling = engine["options"], load["sampling"]
    length = load["input_length"]
    categories = ", ".join(f"{n} {name}" for name, n in load["categories"].items())
    temperature = sampling["temperature"]
    chosen = "greedy" if temperature == 0 else f"temperature {temperature:g}, top-p {sampling['top_p']:g}"
    arrival = "a request follows its predecessor (closed loop)"
    if load["request_rate"] is not None:
        arrival = f"{load['request_rate']:g} requests/s at random (open loop)"
    lines = [
        f"engine   {engine['name']}, digest {engine['digest'][:16]}, target {engine['target']} "
        f"({engine['backend']}), weights {options['weights']}, activations {options['activations']}",
        f"machine  {machine['cpu']}, {machine['threads']} threads, kernels {machine['kernels']}",
        f"load     {load['requests']} requests ({categories}), prompts {load['prompts']}, "
        f"{'as they are' if length is None else f'{length} tokens each'}, "
        f"up to {load['output_length']} tokens of output, {chosen}",
        f"         {arrival}; {load['rounds']} rounds, medians",
    ]
    waits = [s["median"]["processor_wait"] or 0 for s in report["settings"]]
    if max(waits, default=0) > NOTABLE_WAIT:
        lines.append(
            f"note     threads waited for a processor up to {max(waits):.0%} of their time: other processes had them, "
            "or there are more threads than processors"
        )
    if load["wrapped_prompts"]:
        lines.append(
            f"note     {load['wrapped_prompts']} prompts repeat text to be that long, which flatters prompt lookup"
        )
    if load["distinct_prompts"] < load["requests"]:
        lines.append(f"note     the requests have {load['distinct_prompts']} different prompts only")
    if report["interrupted"]:
        lines.append("note     interrupted: what was measured up to then")
    return lines


def speed_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Throughput and latency by setting; the first row has the titles."""
    titles = (
        *("streams", "speculator", "drafts", "tok/s", "vs none", "tok/s each", "prompt tok/s", "prompt each"),
        *("req/s", "TTFT ms p50", "p90", "p99", "ms/token p50", "gap ms p50", "p90", "p99"),
    )
    rows: list[tuple[str, ...]] = [titles]
    for s in report["settings"]:
        m = s["median"]
        rows.append(
            (
                str(s["concurrency"]),
                s["speculator"],
                str(s["draft_length"] or ""),
                number(m["output_tokens_per_s"]),
                "" if s["ratio_to_none"] is None else f"{s['ratio_to_none']:.2f}x",
                number(m["output_tokens_per_s_per_sequence"]),
                number(m["prompt_tokens_per_s"]),
                number(m["prompt_tokens_per_s_per_sequence"]),
                number(m["requests_per_s"]),
                *(_ms(m["ttft_s"], p) for p in ("p50", "p90", "p99")),
                _ms(m["time_per_token_s"], "p50"),
                *(_ms(m["gap_s"], p) for p in ("p50", "p90", "p99")),
            )
        )
    return rows


def acceptance_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Acceptance of drafts, over all and by category of prompts; the first row has the titles."""
    categories = list(report["load"]["categories"])
    rows: list[tuple[str, ...]] = [
        ("streams", "speculator", "drafts", "length", "tok/step", *categories, "accepted by position")
    ]
    for s in report["settings"]:
        if s["speculator"] == NONE:
            continue
        drafts, by = s["acceptance"] or Drafts().to_json(), s["tokens_per_step_by_category"]
        yields = [s["tokens_per_step"]["mean"], *(by[c]["mean"] for c in categories)]
        rates = " ".join("-" if r is None else f"{100 * r:.0f}%" for r in drafts["rates"])
        rows.append(
            (
                str(s["concurrency"]),
                s["speculator"],
                str(s["draft_length"]),
                number(drafts["length"]),
                *map(number, yields),
                rates,
            )
        )
    return rows


def check_text(report: Mapping[str, Any]) -> str:
    """What came of the comparison with plain decoding, in a line."""
    check = report["check"]
    if check is None:
        return "check: greedy texts were not compared with plain decoding's"
    if check["equal"] is None:
        return "check: there was nothing to compare with plain decoding"
    if check["equal"]:
        return f"check: all {check['compared']} greedy texts equal plain decoding's"
    return (
        f"check: {len(check['differences'])} of {check['compared']} greedy texts differ from plain decoding's"
    )


def require_equal(report: Mapping[str, Any]) -> None:
    """Raises UserError if a greedy text was not plain decoding's."""
    check = report["check"]
    if check is None or not check["differences"]:
        return
    found = [
        f"{d['method']}, {d['concurrency']} at a time: request {d['request']} differs from token {d['token']} on"
        for d in check["differences"]
    ]
    shown = found[:10] + ([f"and {len(found) - 10} more"] if len(found) > 10 else [])
    hint = (
        "An engine's text must not depend on speculation or its batch: please report this, with the engine."
    )
    raise UserError("Greedy texts differ from plain decoding's:", shown, hint)


def number(value: float | None) -> str:
    """A figure with three digits or all before the point, whichever is more."""
    if value is None:
        return "-"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ms(values: Mapping[str, float] | None, name: str) -> str:
    return number(None if values is None else 1000 * values[name])


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text in aligned columns: figures to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [all(cell[:1].isdigit() or cell in ("", "-") for cell in c[1:]) for c in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            c.rjust(w) if to_right else c.ljust(w) for c, w, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def report_page(report: Mapping[str, Any]) -> str:
    """The report as an HTML page that needs nothing else."""
    import jinja2

    from nemo_build.runtime.bench import plots

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.jinja").render(
        report=report,
        facts=facts(report),
        speeds=speed_rows(report),
        acceptance=acceptance_rows(report),
        check=check_text(report),
        charts=plots.charts(report),
        legend=plots.legend(report),
        plots=plots,
    )


def check_writable(path: Path) -> None:
    """Raises UserError, before long work, if a file cannot be written."""
    if path.is_dir():
        raise UserError(f"{path} is a directory; name a file for the report.")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(
            f"{path} cannot be written.", hint=f"{path.parent} must be a directory you may write to."
        )
