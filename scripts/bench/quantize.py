# SPDX-License-Identifier: Apache-2.0
"""Quantization of full-size layers: rate and peak memory of the streaming engine, beside ModelOpt's packer.

A checkpoint of a few layers with the widths of the 30B release (a Mamba and an MoE layer with 128 experts, random
BF16 weights, about 2.7 GB) is written, quantized with a weights-only recipe, and deleted. ModelOpt's packer runs
on a few of the same weights in the same run. The time for all 30B parameters is extrapolated from the rate.

    python scripts/bench/quantize.py [--workers N] [--folder DIR] [--out docs/results/quantize.json]

Needs the extra `quantize`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from _process import run

ROOT = Path(__file__).resolve().parent.parent.parent
PARAMETERS_30B = 30e9
RECIPES = {
    "nvfp4": "nvfp4",
    "nvfp4 four-over-six": "nvfp4-four-over-six",
}

OURS = """
import json, resource, sys, time
from pathlib import Path
from nemo_build.export.quantize.quantizer import quantize_checkpoint
from nemo_build.export.quantize.recipe import Recipe, Rule
source, out, weights, workers = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
rule = Rule(("backbone.layers.*",), weights, False)
start, cpu = time.perf_counter(), time.process_time()
result = quantize_checkpoint(source, out, Recipe("bench", "", (rule,), "none"), sequences=[],
                             sequences_source="", workers=workers)
wall, cpu = time.perf_counter() - start, time.process_time() - cpu
usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
peak = max(u.ru_maxrss for u in usage) * 1024
cpu += usage[1].ru_utime + usage[1].ru_stime
print(json.dumps({"wall": wall, "cpu": cpu, "peak_rss": peak}))
"""

PEER = """
import json, sys, time
import torch
from safetensors import safe_open
from modelopt.torch.quantization.qtensor import NVFP4QTensor
torch.set_num_threads(1)
total, cpu = 0, 0.0
with safe_open(sys.argv[1], "pt") as file:
    names = [n for n in file.keys() if ".experts." in n][:9]
    for i, name in enumerate(names):
        weight = file.get_tensor(name)
        start = time.process_time()
        NVFP4QTensor.quantize(weight, 16)
        if i:  # the first warms up
            cpu += time.process_time() - start
            total += weight.numel()
print(json.dumps({"rate": total / cpu}))
"""


def write_layers(folder: Path) -> int:
    """A checkpoint of one Mamba and one MoE layer at full width; returns the parameters of its projections."""
    import ml_dtypes
    import numpy as np
    from synthetic_checkpoint import CONFIG, mixer, write_checkpoint

    tensors = {"backbone.embeddings.weight": ("BF16", (1024, 2688))}
    for i, kind in enumerate(("mamba", "moe")):
        tensors |= mixer(kind, f"backbone.layers.{i}")
    tensors |= {"backbone.norm_f.weight": ("BF16", (2688,)), "lm_head.weight": ("BF16", (1024, 2688))}
    config = {**CONFIG, "layers_block_type": ["mamba", "moe"], "num_hidden_layers": 2, "vocab_size": 1024}
    config |= {"num_nextn_predict_layers": 0}
    write_checkpoint(folder, tensors, config)
    rng = np.random.default_rng(0)
    noise = (rng.standard_normal(1 << 24) * 0.02).astype(ml_dtypes.bfloat16).tobytes()
    (shard,) = folder.glob("*.safetensors")
    with open(shard, "r+b") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
        size = shard.stat().st_size
        file.seek(start)
        while file.tell() < size:
            file.write(noise[: size - file.tell()])
    return sum(math.prod(s) for n, (_, s) in tensors.items() if n.endswith("_proj.weight"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "quantize.json")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "scripts"))
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "checkpoint"
        parameters = write_layers(source)
        (shard,) = source.glob("*.safetensors")
        peer = run(PEER, shard)
        for name, weights in RECIPES.items():
            measured = run(OURS, source, Path(folder) / "out", weights, options.workers)
            shutil.rmtree(Path(folder) / "out")
            rate = parameters / measured["cpu"]
            rows[name] = {**measured, "rate": rate, "hours_30b": PARAMETERS_30B / rate / 3600}
            print(
                f"{name}: {rate / 1e6:.0f} M parameters per CPU-second ({rate / peer['rate']:.1f} x ModelOpt's plain "
                f"packer, {peer['rate'] / 1e6:.0f} M), {measured['wall']:.1f} s for {parameters / 1e9:.2f} G parameters"
                f" with reading and writing, peak RSS {measured['peak_rss'] / 1e6:.0f} MB; "
                f"30B extrapolated: {PARAMETERS_30B / rate / 60:.1f} CPU-minutes"
            )
    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python scripts/bench/quantize.py",
        "workers": options.workers,
        "parameters": parameters,
        "ours": rows,
        "peer_rate": peer["rate"],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
