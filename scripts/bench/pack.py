# SPDX-License-Identifier: Apache-2.0
"""Speed of the weight codecs on one thread, beside ModelOpt's own packers on a CPU.

Each round runs every codec once over eight bfloat16 weights of an expert's shape (together larger than a core's
caches), in turn; reported is the median of the rounds in CPU seconds. Before anything is timed, the bytes are compared
with ModelOpt's. ModelOpt has no CPU implementation of the four-over-six search.

    python scripts/bench/pack.py [--rounds N] [--no-peer] [--out docs/results/pack.json]

The peer needs the extra `quantize`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from nemo_build.plugins.codecs import fp8, native, nvfp4

ROOT = Path(__file__).resolve().parent.parent.parent
SHAPE, COUNT = (1856, 2688), 8
PARAMETERS = 30e9

Codec = Callable[[np.ndarray], object]


def forced(name: str, encode: Codec, weight: np.ndarray) -> object:
    with native.forced(name):
        return encode(weight)


def our_codecs() -> dict[str, Codec]:
    """Every codec on every instruction set, the references last."""
    kinds: dict[str, Codec] = {
        "nvfp4": nvfp4.encode,
        "nvfp4 4/6": partial(nvfp4.encode, four_over_six=True),
        "fp8": fp8.encode,
    }
    sets = (*reversed(native.instruction_sets()), "reference")
    return {
        f"{kind}, {name}": partial(forced, name, encode) for kind, encode in kinds.items() for name in sets
    }


def peer_codecs() -> dict[str, Codec]:
    """ModelOpt's packers on one thread, and the check that they write what ours write."""
    import torch
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    torch.set_num_threads(1)

    def tensor(weight: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(weight.view(np.uint16)).view(torch.bfloat16)

    def pack_nvfp4(weight: np.ndarray) -> object:
        return NVFP4QTensor.quantize(tensor(weight), 16)

    def pack_fp8(weight: np.ndarray) -> torch.Tensor:
        bf16 = tensor(weight)
        return to_quantized_weight(bf16, bf16.abs().max().float() / 448, "fp8")

    weight = expert(0)
    quantized, scales, _ = pack_nvfp4(weight)
    ours = nvfp4.encode(weight)
    assert np.array_equal(ours.codes, quantized._quantized_data.numpy())
    assert np.array_equal(ours.scales, scales.view(torch.uint8).numpy())
    assert np.array_equal(fp8.encode(weight).codes, pack_fp8(weight).view(torch.uint8).numpy())
    return {"nvfp4, ModelOpt": pack_nvfp4, "fp8, ModelOpt": pack_fp8}


def expert(seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(SHAPE) * 0.02).astype(ml_dtypes.bfloat16)


def measure(codecs: dict[str, Codec], rounds: int) -> dict[str, float]:
    """Median CPU seconds of each codec for all weights."""
    weights = [expert(seed) for seed in range(COUNT)]
    times: dict[str, list[float]] = {name: [] for name in codecs}
    for _ in range(rounds):
        for name, encode in codecs.items():
            start = time.process_time()
            for weight in weights:
                encode(weight)
            times[name].append(time.process_time() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "pack.json")
    options = parser.parse_args()
    codecs = our_codecs() if options.no_peer else {**our_codecs(), **peer_codecs()}
    parameters = COUNT * SHAPE[0] * SHAPE[1]
    results = {
        name: {
            "cpu_seconds": seconds,
            "mparam_per_cpu_second": parameters / seconds / 1e6,
            "cpu_seconds_for_30b_extrapolated": PARAMETERS / parameters * seconds,
        }
        for name, seconds in measure(codecs, options.rounds).items()
    }
    print(f"{COUNT} weights {list(SHAPE)} bfloat16, one thread, median of {options.rounds} rounds")
    for name, result in results.items():
        print(
            f"{name:24} {result['mparam_per_cpu_second']:8.1f} Mparam per CPU second; 30e9 parameters, extrapolated, "
            f"packing alone: {result['cpu_seconds_for_30b_extrapolated']:7.1f} CPU s"
        )
    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python scripts/bench/pack.py",
        "python": platform.python_version(),
        "shape": list(SHAPE),
        "weights": COUNT,
        "rounds": options.rounds,
        "best_instruction_set": native.describe(),
        "results": results,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
