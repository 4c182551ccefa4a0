# SPDX-License-Identifier: Apache-2.0
"""The report of a quantization: JSON for machines, one self-contained page for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nemo_build
from nemo_build.export.checkpoint import Checkpoint
from nemo_build.export.names import collapse
from nemo_build.export.quantize.errors import block_scales, weight_errors
from nemo_build.export.quantize.evaluation import Evaluation
from nemo_build.export.quantize.quantizer import QuantizeResult

JSON_NAME = "quant_report.json"
HTML_NAME = "quant_report.html"

_TEMPLATE = Path(__file__).parent / "report.html.jinja"


def build_report(
    result: QuantizeResult,
    evaluation: Evaluation | None,
    skipped: str = "",
    calibrated_on: Mapping[str, str | None] | None = None,
    compared_on: Mapping[str, str | None] | None = None,
) -> dict[str, Any]:
    """The report as plain data.

    Args:
        result: What was done.
        evaluation: The comparison with the original, if it could be run.
        skipped: Why it could not.
        calibrated_on: What identifies the data set of the calibration text, if it is from one.
        compared_on: The same for the text of the comparison.
    """
    original, quantized = Checkpoint.open(result.source), Checkpoint.open(result.out)
    errors = weight_errors(original, quantized, result.assignments)
    calibration = result.calibration
    return {
        "nemo_build": nemo_build.__version__,
        "recipe": result.recipe.to_json(),
        "bytes": {
            role: {"before": result.before.get(role, 0), "after": result.after.get(role, 0)}
            for role in sorted(set(result.before) | set(result.after))
        },
        "weights": {
            module: {
                "format": a.format,
                "search": a.search,
                "activations": a.activations,
                "low_rank": a.rank,
                "rmse": errors[module].rmse,
                "sqnr_db": errors[module].sqnr,
            }
            for module, a in result.assignments.items()
        },
        "block_scales": {f"2^{e}": n for e, n in block_scales(quantized, result.assignments).items()},
        "calibration": None if calibration is None else {**_calibration(result), "dataset": calibrated_on},
        "evaluation": None if evaluation is None else {**evaluation.to_json(), "dataset": compared_on},
        "evaluation_skipped": skipped or None,
    }


def write_report(directory: Path, report: Mapping[str, Any]) -> None:
    """Write both files into a directory."""
    import jinja2

    (directory / JSON_NAME).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report, errors=_error_rows(report), scales=_scale_rows(report), coverage=_coverage_rows(report)
    )
    (directory / HTML_NAME).write_text(page, encoding="utf-8")


def _calibration(result: QuantizeResult) -> dict[str, Any]:
    assert result.calibration is not None
    data = result.calibration.to_json()
    data.pop("amax")
    rounded = any(a.activations and ".experts." in name for name, a in result.assignments.items())
    return {**data, "unreached_experts": result.calibration.unreached(), "experts_rounded": rounded}


def _error_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """SQNR by group of modules (experts of a layer together): name, mean, width of its bar in percent."""
    groups: dict[str, list[float]] = {}
    for module, weight in report["weights"].items():
        if weight["sqnr_db"] is not None:
            prefix, dot, rest = module.partition(".experts.")
            name = f"{prefix}.experts.*.{rest.split('.')[-1]}" if dot else module
            groups.setdefault(name, []).append(weight["sqnr_db"])
    rows = [{"name": name, "value": sum(v) / len(v)} for name, v in groups.items()]
    return _with_bars(rows)


def _scale_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    return _with_bars([{"name": name, "value": count} for name, count in report["block_scales"].items()])


def _coverage_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For each layer with experts: tokens of the least, the median and the most chosen expert."""
    calibration = report["calibration"]
    if calibration is None:
        return []
    rows = []
    for layer, counts in calibration["tokens_per_expert"].items():
        ordered = sorted(counts)
        none = [e for e, n in enumerate(counts) if n == 0]
        unreached = ", ".join(text for text, _ in collapse(f"{e}" for e in none)) if none else ""
        rows.append(
            {
                "name": layer,
                "least": ordered[0],
                "median": ordered[len(ordered) // 2],
                "most": ordered[-1],
                "unreached": unreached,
                "counts": [100 * n / max(ordered[-1], 1) for n in counts],
            }
        )
    return rows


def _with_bars(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    largest = max((row["value"] for row in rows), default=1) or 1
    return [{**row, "width": max(100 * row["value"] / largest, 0)} for row in rows]
