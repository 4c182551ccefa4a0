# SPDX-License-Identifier: Apache-2.0
"""A verdict for people and machines: text, JSON, JUnit's XML, Markdown for a pull request, and a page with plots.

All are made of the plain data of :meth:`~nemo_build.engines.check.verdict.Verdict.to_json`, whose schema is
``report.schema.json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

SCHEMA = Path(__file__).parent / "report.schema.json"
"""JSON schema (draft 2020-12) of a report."""

Report = Mapping[str, Any]

_MARKS = {"pass": "✅", "regress": "❌", "broken": "💥", "skipped": "⏭️"}
_MOST_FIGURES = 10
"""Figures of a check that Markdown lists."""


def json_report(report: Report) -> str:
    """As JSON."""
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def junit_report(report: Report) -> str:
    """As JUnit's XML: a test case for each figure; a regression is a failure, what is broken an error."""
    results = report["results"]
    cases = [(r, f) for r in results for f in r["figures"]] + [(r, None) for r in results if not r["figures"]]
    statuses = [(r if f is None else f)["status"] for r, f in cases]
    counts = {
        "tests": str(len(cases)),
        "failures": str(statuses.count("regress")),
        "errors": str(statuses.count("broken")),
        "skipped": str(statuses.count("skipped")),
        "time": f"{sum(r['seconds'] for r in results):.3f}",
    }
    root = ElementTree.Element("testsuites", {"name": "nemo-build check", **counts})
    for result in results:
        own = [(f, s) for (r, f), s in zip(cases, statuses, strict=True) if r is result]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=_xml(result["check"]),
            tests=str(len(own)),
            failures=str(sum(s == "regress" for _, s in own)),
            errors=str(sum(s == "broken" for _, s in own)),
            skipped=str(sum(s == "skipped" for _, s in own)),
            time=f"{result['seconds']:.3f}",
            timestamp=report["facts"]["date"][:19],
        )
        for figure, status in own:
            _test_case(suite, result, figure, status, result["seconds"] / len(own))
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _test_case(
    suite: ElementTree.Element, result: Report, figure: Report | None, status: str, seconds: float
) -> None:
    name = "check" if figure is None else figure["name"]
    case = ElementTree.SubElement(
        suite, "testcase", classname=_xml(result["check"]), name=_xml(name), time=f"{seconds:.3f}"
    )
    tag = {"regress": "failure", "broken": "error", "skipped": "skipped"}.get(status)
    if tag is None:
        return
    message = result["headline"] if figure is None else _figure_text(figure)
    found = ElementTree.SubElement(case, tag, message=_xml(message))
    if tag != "skipped":
        found.set("type", status)
        found.text = _xml("\n".join([result["headline"], *(f"likely cause: {c}" for c in result["causes"])]))


def _xml(text: str) -> str:
    """Without the control characters that XML 1.0 has no way to write."""
    return "".join(c for c in str(text) if c in "\t\n" or ord(c) >= 32)


def _figure_text(figure: Report) -> str:
    was = "" if figure["baseline"] is None else f", recorded {value_text(figure['baseline'])}"
    limit = f" ({figure['limit']})" if figure["limit"] else ""
    note = f"; {figure['note']}" if figure["note"] else ""
    return f"{figure['name']} is {value_text(figure['value'])}{was}{limit}{note}"


def value_text(value: Any) -> str:
    """A value for people."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "…"


def text_report(report: Report) -> str:
    """For a terminal: a line for each check, then what is not as it should be, with likely causes."""
    lines = [_title(report), ""]
    width = max((len(r["check"]) for r in report["results"]), default=0)
    lines += [
        f"{r['status']:<8} {r['check']:<{width}} {r['seconds']:6.1f} s  {_first_line(r)}"
        for r in report["results"]
    ]
    for result in _bad(report):
        lines += ["", f"{result['check']}: {result['headline']}"]
        lines += [f"  {_figure_text(f)}" for f in result["figures"] if f["status"] != "pass"]
        lines += [f"  likely cause: {c}" for c in result["causes"]]
        if "traceback" in result["details"]:
            lines += ["", result["details"]["traceback"].rstrip()]
    lines += ["", *_remarks(report)]
    return "\n".join(lines).rstrip()


def markdown_report(report: Report) -> str:
    """For a comment on a pull request."""
    lines = [f"### {_MARKS[report['status']]} {_markdown(_title(report))}", ""]
    lines += ["| | check | outcome | s |", "|---|---|---|---:|"]
    lines += [
        f"| {_MARKS[r['status']]} {r['status']} | {_markdown(r['check'])} | {_markdown(_first_line(r))} |"
        f" {r['seconds']:.1f} |"
        for r in report["results"]
    ]
    for result in _bad(report):
        lines += ["", f"**{_markdown(result['check'])}**: {_markdown(result['headline'])}", ""]
        bad = [f for f in result["figures"] if f["status"] != "pass"]
        lines += [f"- {_markdown(_figure_text(f))}" for f in bad[:_MOST_FIGURES]]
        if len(bad) > _MOST_FIGURES:
            lines.append(f"- and {len(bad) - _MOST_FIGURES} more")
        if result["causes"]:
            lines += ["", "Likely causes:", "", *(f"- {_markdown(c)}" for c in result["causes"])]
    lines += ["", *(f"{_markdown(line)}  " for line in _remarks(report))]
    return "\n".join(lines).rstrip() + "\n"


def html_report(report: Report) -> str:
    """As a page that needs nothing else."""
    import jinja2

    from nemo_build.engines.check.plots import charts
    from nemo_build.runtime.bench import plots

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["value"] = value_text
    return environment.get_template("report.html.jinja").render(
        report=report, title=_title(report), charts=charts(report), plots=plots, remarks=_remarks(report)
    )


REPORTS: Mapping[str, Callable[[Report], str]] = {
    "json": json_report,
    "junit": junit_report,
    "markdown": markdown_report,
    "html": html_report,
}
"""What writes a report into a file, by the option of the command line that names the file."""


def _title(report: Report) -> str:
    engine = report["facts"]["engine"]
    return f"{report['status']}: {engine['name']} ({engine['target']}, {engine['digest']})"


def _first_line(result: Report) -> str:
    waived = f" (waived: {', '.join(w['name'] for w in result['waived'])})" if result["waived"] else ""
    return str(result["headline"]).splitlines()[0] + waived


def _bad(report: Report) -> list[Report]:
    return [r for r in report["results"] if r["status"] in ("regress", "broken")]


def _remarks(report: Report) -> Sequence[str]:
    facts = report["facts"]
    was = facts["baseline"]["engine"]
    found = [
        f"baseline: {facts['baseline']['directory']}, engine {was.get('digest', 'none')}; suite: {facts['suite']}"
    ]
    skipped = [r["check"] for r in report["results"] if r["status"] == "skipped"]
    if skipped:
        allowed = [n for n in skipped if n in report["allowed"]]
        found.append(
            f"not checked: {', '.join(skipped)}"
            + (f" (may be skipped: {', '.join(allowed)})" if allowed else "")
        )
    found += [f"the waiver of {name} waives nothing; remove it" for name in facts["unused_waivers"]]
    return found


def _markdown(text: str) -> str:
    """Text as it is, within a line or a table's cell."""
    for sign in "\\`*_<>|[]":
        text = text.replace(sign, "\\" + sign)
    return " ".join(text.split())
