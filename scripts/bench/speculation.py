# SPDX-License-Identifier: Apache-2.0
"""Speculation on the demo checkpoint: acceptance length and speed by speculator and draft length.

Greedy continuations of texts that the checkpoint was not trained on (the default calibration text), one sequence at a
time and several together. Settings take turns over the rounds; speeds are medians, compared with plain decoding.

    python scripts/bench/speculation.py [--rounds N] [--out docs/results/speculation.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from _quiet import machine

from nemo_build.demo import CHECKPOINT, DRAFTERS
from nemo_build.engines.build import BuildOptions, build_engine
from nemo_build.export.exporter import export_bundle
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, read_texts
from nemo_build.runtime import Engine, SamplingParams

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPTS, PROMPT_TOKENS, TOKENS = 16, 64, 128
BATCHES = (1, 8)
SPECULATORS = ("mtp", *DRAFTERS, "ngram")
"""Those that the demo checkpoint and its drafters have what it takes for."""


def settings() -> list[tuple[str, int | None]]:
    """Speculator and draft length; None chooses the length from step to step."""
    return [("none", None), *((name, length) for name in SPECULATORS for length in (None, 1, 2, 4, 7))]


def measure(
    directory: Path, name: str, length: int | None, prompts: list[list[int]], batch: int
) -> dict[str, Any]:
    """Generate from all prompts, `batch` at a time; tokens per second and what came of the drafts."""
    engine = Engine.load(directory, max_sequences=batch, speculate=name, draft_length=length)
    params = SamplingParams(max_tokens=TOKENS, temperature=0)
    engine.generate(prompts, params)  # so that what learns has learnt
    start = time.perf_counter()
    completions = engine.generate(prompts, params)
    seconds = time.perf_counter() - start
    tokens = sum(len(c.token_ids) for c in completions)
    a = engine.acceptance
    return {
        "speed": tokens / seconds,
        "acceptance_length": a.length,
        "drafted": a.drafted,
        "accepted": a.accepted,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "speculation.json")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = export_bundle(CHECKPOINT, Path(folder) / "bundle", drafts=list(DRAFTERS.values())).out
        engine = build_engine(bundle, Path(folder) / "engine", options=BuildOptions(max(BATCHES), 1024)).out
        tokenizer = Engine.load(engine).tokenizer
        texts = [tokenizer.encode(t) for t in read_texts(DEFAULT_TEXT)]
        prompts = [t[:PROMPT_TOKENS] for t in texts if len(t) >= PROMPT_TOKENS][:PROMPTS]
        for _ in range(options.rounds):
            for batch in BATCHES:
                for name, length in settings():
                    key = f"{name}/{'auto' if length is None else length}/{batch}"
                    found.setdefault(key, []).append(measure(engine, name, length, prompts, batch))
    cases = []
    for key, rounds in found.items():
        name, length, batch = key.split("/")
        speed = statistics.median(r["speed"] for r in rounds)
        plain = statistics.median(r["speed"] for r in found[f"none/auto/{batch}"])
        case = {**rounds[-1], "speculator": name, "draft_length": length, "batch": int(batch)}
        cases.append({**case, "speed": speed, "ratio": speed / plain})
        print(
            f"{key}: acceptance length {case['acceptance_length']:.2f}, {speed:.0f} tokens/s, {speed / plain:.2f}x"
        )
    record = {
        **machine(),
        "command": "python scripts/bench/speculation.py",
        "rounds": options.rounds,
        "prompts": len(prompts),
        "cases": cases,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
