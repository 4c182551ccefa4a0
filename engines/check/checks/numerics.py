# SPDX-License-Identifier: Apache-2.0
"""``numerics``: the engine's logits are those that were recorded, and near those of the portable reference.

What is recorded of a position is the few most likely tokens with their log-probabilities, the mass of all others, and
the log-probabilities of a sample of the vocabulary, the same tokens everywhere. The divergence from that is a lower
bound of the true one (the data-processing inequality), and close to it, as the others have little mass. Cosine and
relative error are those of the sampled tokens' centred log-probabilities.

Of each layer a sketch of its output is recorded: its product with a fixed random matrix, which keeps distances up to
some tens of per cent (Johnson and Lindenstrauss, 1984). So the first layer that differs is known without a second
engine. Of an engine that cannot be looked into there are those that it returns itself, for drafters.

With a model bundle as the reference, ONNX Runtime computes its logits in float32, and nothing is sampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.engines.check.checks import Judgement
from nemo_build.engines.check.checks import Settings as Base
from nemo_build.engines.check.prompts import logits_of, token_sequences
from nemo_build.engines.check.returned import returned
from nemo_build.engines.check.subject import Subject
from nemo_build.engines.check.trace import can_trace, relative_error, trace
from nemo_build.engines.check.verdict import Figure, Status
from nemo_build.export.quantize.evaluation import log_softmax

NAME = "numerics"
MEASURED = ("sequences", "tokens", "every", "top", "sample")
NEEDS_BASELINE = True
HARDWARE = False

_SKETCH = 12
"""Numbers of a layer's sketch."""

_MIXED = 24
"""Tokens of each text that layers are traced on, as one sequence."""


@dataclass(frozen=True)
class Settings(Base):
    """How far logits may be off.

    Attributes:
        sequences: Texts.
        tokens: Tokens of each.
        every: Positions between those that are recorded.
        top: Most likely tokens that are recorded of a position.
        sample: Further tokens, the same at each position.
        kl_mean: Largest mean divergence in nats.
        kl_p99: Largest 99th percentile of it.
        top1: Smallest share of positions with the same most likely token.
        cosine: Smallest mean cosine of centred log-probabilities.
        max_error: Largest difference of a log-probability over the largest one of its position; ``None``: any.
        layer_error: Relative difference of a layer's output that counts.
        reference_kl_mean: Largest mean divergence from the portable reference, where that is at hand.
        reference_kl_p99: Largest 99th percentile of it.
        reference_top1: Smallest share of positions with the reference's most likely token.
    """

    sequences: int = 8
    tokens: int = 96
    every: int = 8
    top: int = 8
    sample: int = 8
    kl_mean: float = 2e-4
    kl_p99: float = 2e-3
    top1: float = 0.98
    cosine: float = 0.999
    max_error: float | None = None
    layer_error: float = 0.01
    reference_kl_mean: float = 0.02
    reference_kl_p99: float = 0.2
    reference_top1: float = 0.93


def measure(subject: Subject, settings: Settings) -> dict[str, Any]:
    """What each recorded position predicts, a sketch of each layer, and the distance from the reference."""
    engine = subject.engine()
    sequences = token_sequences(engine, settings.sequences, settings.tokens)
    sampled = np.linspace(0, engine.spec.vocab_size - 1, settings.sample).astype(int)
    rows = [log_softmax(logits_of(engine.session, tokens)) for tokens in sequences]  # type: ignore[arg-type]
    positions = []
    for i, logs in enumerate(rows):
        for place in range(settings.every - 1, len(logs), settings.every):
            row = logs[place]
            best = np.argsort(-row, kind="stable")[: settings.top]
            positions.append(
                {
                    "at": f"{i}:{place}",
                    "tokens": best.tolist(),
                    "logprobs": [round(float(v), 5) for v in row[best]],
                    "sample": [round(float(v), 3) for v in row[sampled]],
                }
            )
    found: dict[str, Any] = {"positions": positions}
    mixed, traced = _mixed(sequences), can_trace(subject.manifest, "target")
    found["layers"] = _sketches(
        _outputs(subject.path, mixed, subject.manifest) if traced else returned(subject, mixed)
    )
    if subject.reference is not None:
        found["reference"] = _against(subject.reference, sequences, rows)
        if traced:
            mine = _outputs(subject.path, mixed, subject.manifest)
            want = _outputs(subject.reference, mixed, subject.manifest)
            found["reference"]["layers"] = {
                n: relative_error(v, mine[n]) for n, v in want.items() if n in mine
            }
    return found


def summary(found: Mapping[str, Any]) -> dict[str, float]:
    """Nothing but the distance from the reference says anything by itself."""
    reference = found.get("reference")
    return {"reference kl_mean": reference["kl_mean"]} if reference else {}


def judge(now: Mapping[str, Any], before: Mapping[str, Any] | None, settings: Settings) -> Judgement:
    """Divergence at each position that both have."""
    was = before or now
    recorded = {p["at"]: p for p in was["positions"]}
    pairs = [(recorded[p["at"]], p) for p in now["positions"] if p["at"] in recorded]
    if len(pairs) < len(recorded) or len(pairs) < len(now["positions"]):
        figure = Figure(
            "positions", Status.REGRESS, len(now["positions"]), len(recorded), "as many as recorded"
        )
        return Judgement("the texts have other numbers of tokens than when it was recorded", [figure])
    figures, divergence = _figures(pairs, settings)
    layers = _layer_errors(was.get("layers", {}), now.get("layers", {}))
    beyond = [name for name, error in layers.items() if not error <= settings.layer_error]
    if layers:
        figures.append(
            Figure(
                "layers",
                Status.REGRESS if beyond else Status.PASS,
                max(layers.values()),
                limit=f"at most {settings.layer_error:g}",
                note=f"first beyond it: {beyond[0]}" if beyond else "",
            )
        )
    figures += _reference_figures(now.get("reference"), settings)
    details = {
        "divergence": [float(d) for d in divergence],
        "at": [a["at"] for a, _ in pairs],
        "layers": layers,
        "reference layers": now.get("reference", {}).get("layers", {}),
    }
    wrong = any(f.status is not Status.PASS for f in figures)
    source, causes = _source(layers, beyond, settings) if wrong and layers else ("", [])
    headline = f"mean divergence {divergence.mean():.2e} nats over {len(pairs)} positions"
    return Judgement(headline, figures, causes, details, where=source)


def _figures(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], settings: Settings
) -> tuple[list[Figure], NDArray[np.float64]]:
    """What is judged of the recorded positions, and the divergence at each."""
    divergence = np.array([_divergence(a, b) for a, b in pairs])
    errors = [_error(a, b) for a, b in pairs]
    agree = float(np.mean([a["tokens"][0] == b["tokens"][0] for a, b in pairs]))
    cosines = [_cosine(a["sample"], b["sample"]) for a, b in pairs]
    worst = pairs[int(np.nan_to_num(divergence, nan=np.inf).argmax())][0]["at"]
    error_limit = np.inf if settings.max_error is None else settings.max_error
    figures = [
        _at_most("kl_mean", float(divergence.mean()), settings.kl_mean),
        _at_most("kl_p99", _p99(divergence), settings.kl_p99, f"largest at {worst} (text:position)"),
        _at_least("top1", agree, settings.top1),
        _at_least("cosine", float(np.mean(cosines)), settings.cosine, f"smallest {min(cosines):.6f}"),
        _at_most("max_error", max(errors), error_limit, "relative, of a log-probability"),
    ]
    return figures, divergence


def _reference_figures(found: Mapping[str, Any] | None, settings: Settings) -> list[Figure]:
    if found is None:
        return []
    return [
        _at_most("reference kl_mean", found["kl_mean"], settings.reference_kl_mean),
        _at_most("reference kl_p99", found["kl_p99"], settings.reference_kl_p99),
        _at_least("reference top1", found["top1"], settings.reference_top1),
        _at_most("reference max_error", found["max_error"], np.inf, f"mean cosine {found['cosine']:.6f}"),
    ]


def _source(layers: Mapping[str, float], beyond: Sequence[str], settings: Settings) -> tuple[str, list[str]]:
    """Where the error is likely to come from, by its growth from layer to layer, and that in words."""
    if not beyond:
        return "lm_head", ["no layer differs beyond the tolerance: what follows them does, the head"]
    names = list(layers)
    upto = names[: names.index(beyond[0]) + 1]
    previous = [0.0, *(layers[n] for n in upto[:-1])]
    growth = {n: layers[n] / max(p, settings.layer_error / 100) for n, p in zip(upto, previous, strict=True)}
    source = max(growth, key=lambda n: growth[n])
    text = f"the error begins at {source} ({layers[source]:.2g}) and is beyond the tolerance at {beyond[0]}"
    return source, [text]


def _at_most(name: str, value: float, limit: float, note: str = "") -> Figure:
    status = Status.PASS if value <= limit and np.isfinite(value) else Status.REGRESS
    return Figure(name, status, value, limit=f"at most {limit:g}" if np.isfinite(limit) else "any", note=note)


def _at_least(name: str, value: float, limit: float, note: str = "") -> Figure:
    status = Status.PASS if value >= limit else Status.REGRESS  # what is not a number is no pass
    return Figure(name, status, value, limit=f"at least {limit:g}", note=note)


def _p99(values: NDArray[np.float64]) -> float:
    return float(np.quantile(values, 0.99, method="higher"))  # interpolating between infinities gives none


def _divergence(was: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """KL(was ‖ now) over the tokens that both name and one class of all others."""
    mine, theirs = (dict(zip(p["tokens"], p["logprobs"], strict=True)) for p in (was, now))
    shared = [t for t in mine if t in theirs]
    p, q = (np.exp(np.array([side[t] for t in shared], float)) for side in (mine, theirs))
    p, q = (np.append(side, max(1 - side.sum(), 1e-9)) for side in (p, q))
    return max(float((p * np.log(p / q)).sum()), 0.0) if np.isfinite([p, q]).all() else np.inf


def _error(was: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Largest difference of sampled log-probabilities over the largest of them."""
    a, b = np.array(was["sample"], float), np.array(now["sample"], float)
    error = float(np.abs(a - b).max() / np.abs(a).max())
    return error if np.isfinite(error) else np.inf


def _cosine(was: Sequence[float], now: Sequence[float]) -> float:
    a, b = (np.array(v, float) - np.mean(np.array(v, float)) for v in (was, now))
    product = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / product if product else 1.0


def _sketches(outputs: Mapping[str, NDArray[Any]]) -> dict[str, list[float]]:
    """Of each layer's output: its product with a fixed random matrix, over all tokens."""
    found: dict[str, list[float]] = {}
    for name, value in outputs.items():
        matrix = np.random.default_rng(len(found)).standard_normal((_SKETCH, value.size))
        found[name] = [float(f"{v:.5g}") for v in matrix @ value.ravel().astype(np.float64)]
    return found


def _outputs(path: Path, tokens: Sequence[int], manifest: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """What each layer adds up to, ``[1, L, H]``, by the layer's name; and what drafters get of them."""
    layers = [f"backbone.layers.{i}" for i in range(len(manifest["spec"]["layers"]))]
    values = trace(path, tokens, only={*(f"{layer}/residual" for layer in layers), "taps", "hidden"}).values
    return {name.removesuffix("/residual"): value for name, value in values.items()}


def _mixed(sequences: Sequence[Sequence[int]]) -> list[int]:
    return [token for tokens in sequences for token in tokens[:_MIXED]]


def _layer_errors(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, float]:
    """Relative difference of sketches of layers that both have."""
    pairs = {n: (np.array(was[n], float), np.array(now[n], float)) for n in was if n in now}
    return {n: relative_error(a, b) for n, (a, b) in pairs.items()}


def _against(
    bundle: Path, sequences: Sequence[Sequence[int]], rows: Sequence[NDArray[np.float64]]
) -> dict[str, Any]:
    """How far log-probabilities are from those of a model bundle in float32."""
    divergence, agree, cosines, errors = [], [], [], []
    for tokens, mine in zip(sequences, rows, strict=True):
        want = log_softmax(trace(bundle, tokens, only={"logits"}).values["logits"])
        divergence += (np.exp(want) * (want - mine)).sum(-1).tolist()
        agree += (want.argmax(-1) == mine.argmax(-1)).tolist()
        cosines += [_cosine(a, b) for a, b in zip(want, mine, strict=True)]
        errors.append(float((np.abs(want - mine).max(-1) / np.abs(want).max(-1)).max()))
    return {
        "kl_mean": float(np.mean(divergence)),
        "kl_p99": _p99(np.array(divergence)),
        "top1": float(np.mean(agree)),
        "cosine": float(np.mean(cosines)),
        "max_error": max(errors),
    }
