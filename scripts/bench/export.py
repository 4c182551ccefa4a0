# SPDX-License-Identifier: Apache-2.0
"""Time and memory of an export at full size, beside a tracing export of a tiny model of the same depth.

Ours exports a checkpoint with the 6,513 tensors of the 30B release (sparse files of zeros; the weights are
not read, so their values do not matter). The peer is ``torch.onnx.export(dynamo=True)`` of transformers'
NemotronH with the same 52-layer pattern and toy widths, one forward pass without cache: the least it could
be asked for. Each run is a process of its own; ours is the median of several.

    python scripts/bench/export.py [--runs N] [--no-peer] [--out docs/results/export.json]

The peer needs the extras `test` and the package onnxscript.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import tempfile
from pathlib import Path

from _process import run

ROOT = Path(__file__).resolve().parent.parent.parent

OURS = """
import json, resource, sys, time
start = time.perf_counter()
from pathlib import Path
from nemo_build.export.exporter import export_bundle
out = Path(sys.argv[2])
result = export_bundle(Path(sys.argv[1]), out)
seconds = time.perf_counter() - start
written = sum(p.stat().st_size for p in out.iterdir() if p.is_file())
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_rss": peak, "written": written,
                  "tensors": len(result.ledger.entries), "checkpoint_bytes": result.ledger.nbytes}))
"""

PEER = """
import json, logging, resource, sys, time, warnings
warnings.filterwarnings("ignore")
start = time.perf_counter()
import torch
from transformers import NemotronHConfig, NemotronHForCausalLM
torch.manual_seed(0)
config = NemotronHConfig(
    vocab_size=128, hidden_size=64, hybrid_override_pattern=sys.argv[1], num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, ssm_state_size=16, mamba_num_heads=8, mamba_head_dim=8, n_groups=2,
    n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=32, max_position_embeddings=256,
)
model = NemotronHForCausalLM(config).eval()
model.set_experts_implementation("batched_mm")
class Logits(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = model
    def forward(self, ids):
        return self.model(ids, use_cache=False).logits
ids = torch.zeros(1, 20, dtype=torch.long)
length = torch.export.Dim("length", min=2, max=256)
program = torch.onnx.export(Logits(), (ids,), dynamo=True, opset_version=23, dynamic_shapes=({1: length},),
                            verbose=False)
program.save(sys.argv[2])
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print()
print(json.dumps({"seconds": seconds, "peak_rss": peak, "nodes": len(list(program.model.graph)),
                  "torch": torch.__version__}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "export.json")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "scripts"))
    from synthetic_checkpoint import CONFIG, PATTERN, release_tensors, write_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "checkpoint"
        write_checkpoint(checkpoint, release_tensors(), CONFIG)
        runs = [run(OURS, checkpoint, Path(folder) / f"bundle{i}") for i in range(options.runs)]
        peer = None if options.no_peer else run(PEER, PATTERN, Path(folder) / "peer.onnx")
    ours = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
    print(
        f"nemo-build export, 30B shape: {ours['seconds']:.2f} s (median of {options.runs}), "
        f"peak RSS {ours['peak_rss'] / 1e6:.0f} MB, {ours['written'] / 1e6:.2f} MB written, "
        f"{ours['tensors']:.0f} tensors, {ours['checkpoint_bytes'] / 1e9:.1f} GB referenced"
    )
    if peer:
        print(
            f"torch.onnx.export(dynamo=True), 52 layers at toy width: {peer['seconds']:.1f} s, "
            f"peak RSS {peer['peak_rss'] / 1e6:.0f} MB, {peer['nodes']} nodes"
        )
        print(f"ratio of times: {peer['seconds'] / ours['seconds']:.0f}")
    record = {
        "date": datetime.date.today().isoformat(),
        "command": "python scripts/bench/export.py",
        "python": platform.python_version(),
        "ours": ours,
        "peer": peer,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {options.out}")


if __name__ == "__main__":
    main()
