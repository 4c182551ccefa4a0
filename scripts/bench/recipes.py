# SPDX-License-Identifier: Apache-2.0
"""What each shipped recipe costs on the demo checkpoint: size, KL divergence, most likely token, perplexity.

Calibrates on the first half of the default text and compares on the second.

    python scripts/bench/recipes.py [--out docs/results/recipes.json]

Needs the extra `quantize` for the recipes that ModelOpt runs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

from nemo_build.demo import CHECKPOINT
from nemo_build.engines.compare import compare_checkpoints
from nemo_build.export.quantize.calibration import DEFAULT_TEXT, read_texts
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import load_recipe, shipped_recipes
from nemo_build.runtime.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent.parent
SEQUENCES = 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "recipes.json")
    options = parser.parse_args()
    tokenizer = Tokenizer.load(CHECKPOINT)
    sequences = [tokenizer.encode(t)[:256] for t in read_texts(DEFAULT_TEXT)[:SEQUENCES]]
    half = len(sequences) // 2
    recipes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in shipped_recipes():
            out = Path(folder) / name
            result = quantize_checkpoint(
                CHECKPOINT,
                out,
                load_recipe(name),
                sequences=sequences[:half],
                sequences_source=DEFAULT_TEXT.name,
            )
            evaluation, skipped = compare_checkpoints(CHECKPOINT, out, sequences[half:])
            if evaluation is None:
                raise SystemExit(skipped)
            recipes[name] = {"bytes": sum(result.after.values()), "evaluation": evaluation.to_json()}
            e = evaluation
            print(
                f"{name}: KL {e.kl_mean:.5f}, p99 {e.kl_p99:.4f}, top-1 {e.top1:.4f}, perplexity {e.perplexity:.4f}"
            )
    ordered = dict(sorted(recipes.items(), key=lambda item: item[1]["evaluation"]["kl_mean"]))
    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python scripts/bench/recipes.py",
        "recipes": ordered,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
