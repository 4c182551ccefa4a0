# SPDX-License-Identifier: Apache-2.0
"""Random-weight GGUF files of Nemotron-H shapes, for measuring llama.cpp without a checkpoint.

Written straight from a model's configuration, one tensor in memory at a time. Every matrix that is read per token is
stored in the one type asked for, embeddings and head included; router, convolution, norms and the per-head vectors are
float32, as llama.cpp's own converter and `llama-quantize --pure` leave them. The values are random with a standard
deviation near 0.02, so that activations stay finite and routing spreads over the experts. The tokenizer is llama.cpp's
own for tests, which writes an id as a number: prompts are token ids, but its server must have a text for each.

    python scripts/bench/_gguf.py MODEL OUT.gguf [--type q4_0|nvfp4|mxfp4]     MODEL: config.json or its directory
    python scripts/bench/_gguf.py --show FILE.gguf

Needs the package gguf (tested with 0.19.0).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_build.spec import BlockKind, ModelSpec, load_spec, spec_from_config

try:
    import gguf
except ImportError:
    sys.exit("the package gguf is missing: pip install gguf==0.19.0")

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]

ARCHITECTURE = "nemotron_h_moe"
CONTEXT = 1 << 20
DEVIATION = 0.02
TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in ("q4_0", "nvfp4", "mxfp4")}
_FILE_TYPES = {
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "nvfp4": gguf.LlamaFileType.MOSTLY_NVFP4,
    "mxfp4": gguf.LlamaFileType.MOSTLY_MXFP4_MOE,
}

_E2M1_RMS = math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
_E4M3_RMS = math.sqrt(sum((1 + m / 8) ** 2 for m in range(8)) / 8)  # of the block scales drawn, 1 to 1.875
NVFP4_SCALE = DEVIATION / (_E2M1_RMS * _E4M3_RMS)


@dataclass(frozen=True)
class Tensor:
    """One tensor: its name, its shape (outermost first) and how its values are drawn."""

    name: str
    shape: Shape
    values: str  # "matrix", or the name of a float32 distribution of :func:`_plain`


def tensors(spec: ModelSpec) -> Iterator[Tensor]:
    """All tensors llama.cpp wants of such a model, in order (no multi-token prediction)."""
    hidden, vocabulary = spec.hidden_size, spec.vocab_size
    yield Tensor("token_embd.weight", (vocabulary, hidden), "matrix")
    for i, kind in enumerate(spec.layers):
        yield Tensor(f"blk.{i}.attn_norm.weight", (hidden,), "one")
        for name, shape, values in _mixer(spec, kind):
            yield Tensor(f"blk.{i}.{name}", shape, values)
    yield Tensor("output_norm.weight", (hidden,), "one")
    if not spec.tie_word_embeddings:
        yield Tensor("output.weight", (vocabulary, hidden), "matrix")


def _mixer(spec: ModelSpec, kind: BlockKind) -> Iterator[tuple[str, Shape, str]]:
    hidden = spec.hidden_size
    if kind is BlockKind.MAMBA and (m := spec.mamba):
        yield "ssm_in.weight", (m.in_proj_size, hidden), "matrix"
        yield "ssm_conv1d.weight", (m.conv_dim, m.conv_kernel), "conv"
        if m.conv_bias:
            yield "ssm_conv1d.bias", (m.conv_dim,), "zero"
        yield "ssm_dt.bias", (m.num_heads,), "dt"
        yield "ssm_a", (m.num_heads, 1), "decay"
        yield "ssm_d", (m.num_heads, 1), "one"
        yield "ssm_norm.weight", (m.num_groups, m.inner_size // m.num_groups), "one"
        yield "ssm_out.weight", (hidden, m.inner_size), "matrix"
    elif kind is BlockKind.ATTENTION and (a := spec.attention):
        yield "attn_q.weight", (a.num_heads * a.head_dim, hidden), "matrix"
        yield "attn_k.weight", (a.num_kv_heads * a.head_dim, hidden), "matrix"
        yield "attn_v.weight", (a.num_kv_heads * a.head_dim, hidden), "matrix"
        yield "attn_output.weight", (hidden, a.num_heads * a.head_dim), "matrix"
    elif kind is BlockKind.MOE and (e := spec.moe):
        yield "ffn_gate_inp.weight", (e.num_experts, hidden), "normal"
        yield "exp_probs_b.bias", (e.num_experts,), "zero"
        yield "ffn_up_exps.weight", (e.num_experts, e.intermediate_size, hidden), "matrix"
        yield "ffn_down_exps.weight", (e.num_experts, hidden, e.intermediate_size), "matrix"
        yield "ffn_up_shexp.weight", (e.shared_intermediate_size, hidden), "matrix"
        yield "ffn_down_shexp.weight", (hidden, e.shared_intermediate_size), "matrix"


def write(spec: ModelSpec, path: Path, kind: str = "q4_0", seed: int = 0) -> None:
    """Write the file under a temporary name, then rename it."""
    type_ = TYPES[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, ARCHITECTURE)
    _write_metadata(writer, spec, kind)
    plan = list(tensors(spec))
    for t in plan:
        if t.values == "matrix":
            if t.shape[-1] % block:
                raise SystemExit(f"{t.name}: rows of {t.shape[-1]} are not whole blocks of {block} ({kind})")
            shape = (*t.shape[:-1], t.shape[-1] // block * block_bytes)
            writer.add_tensor_info(t.name, shape, np.dtype(np.uint8), math.prod(shape), type_)
        else:
            writer.add_tensor_info(t.name, t.shape, np.dtype(np.float32), 4 * math.prod(t.shape))
    scales = {}
    if kind == "nvfp4":  # each matrix has its second scale beside it, as a converted checkpoint does
        matrices = (t for t in plan if t.values == "matrix" and t.name != "token_embd.weight")
        scales = {t.name.replace(".weight", ".scale"): t.shape[:-2] or (1,) for t in matrices}
    for name, shape in scales.items():
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.Generator(np.random.SFC64(seed))
    for t in plan:
        if t.values == "matrix":
            data = _blocks(rng, kind, math.prod(t.shape) // block, embedding=t.name == "token_embd.weight")
        else:
            data = _plain(rng, t.values, t.shape)
        writer.write_tensor_data(data)
    for shape in scales.values():
        writer.write_tensor_data(np.full(shape, NVFP4_SCALE, np.float32))
    writer.close()
    partial.replace(path)


def _write_metadata(writer: Any, spec: ModelSpec, kind: str) -> None:
    """What llama.cpp reads of the model. Refuses what this module has no tensors for."""
    mamba, attention, moe = spec.mamba, spec.attention, spec.moe
    if not mamba or not attention or not moe or BlockKind.MLP in spec.layers:
        raise SystemExit("the model must be made of Mamba, attention and MoE layers")
    if moe.latent_size or moe.bias or mamba.proj_bias or moe.num_expert_groups > 1:
        raise SystemExit("latent projections, biases of projections and expert groups are not written")
    writer.add_name(f"random {kind}")
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"{i:x}" for i in range(spec.vocab_size)])
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(CONTEXT)
    writer.add_block_count(len(spec.layers))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_layer_norm_eps(spec.norm_eps)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_scaling_finetuned(False)
    # What a layer is follows from these two lists: neither heads nor width is Mamba, a width is experts.
    writer.add_feed_forward_length([moe.intermediate_size * (k is BlockKind.MOE) for k in spec.layers])
    writer.add_head_count_kv([attention.num_kv_heads * (k is BlockKind.ATTENTION) for k in spec.layers])
    writer.add_head_count(attention.num_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    writer.add_ssm_conv_kernel(mamba.conv_kernel)
    writer.add_ssm_inner_size(mamba.inner_size)
    writer.add_ssm_state_size(mamba.state_size)
    writer.add_ssm_time_step_rank(mamba.num_heads)
    writer.add_ssm_group_count(mamba.num_groups)
    writer.add_expert_count(moe.num_experts)
    writer.add_expert_used_count(moe.top_k)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(moe.intermediate_size)
    writer.add_expert_shared_feed_forward_length(moe.shared_intermediate_size)
    writer.add_expert_weights_norm(moe.norm_topk_prob)
    writer.add_expert_weights_scale(moe.scaling_factor)
    writer.add_expert_group_count(1)


def _blocks(rng: np.random.Generator, kind: str, count: int, embedding: bool) -> Array:
    """Random blocks: any codes, scales that give the deviation."""
    size = gguf.GGML_QUANT_SIZES[TYPES[kind]][1]
    data: Array = rng.integers(0, 256, (count, size), np.uint8)
    if kind == "q4_0":  # a float16 scale, then codes 0 to 15 for -8 to 7; its sign keeps the mean at zero
        scale = DEVIATION / math.sqrt((16**2 - 1) / 12)
        either = np.array([[scale], [-scale]], "<f2").view(np.uint8)
        data[:, :2] = either[data[:, 0] & 1]
    elif kind == "nvfp4":  # four E4M3 scales, then 64 codes; embeddings have no second scale, hence tiny ones
        data[:, :4] = (data[:, :4] & 1) + 3 if embedding else (data[:, :4] & 7) | 0x38
    else:  # an exponent, then 32 codes
        data[:, 0] = 127 + round(math.log2(DEVIATION / _E2M1_RMS))
    return data


def _plain(rng: np.random.Generator, values: str, shape: Shape) -> Array:
    """A float32 tensor; the distributions are those of the model's own initialization."""
    if values == "dt":  # softplus of it is between 0.001 and 0.1
        dt = np.exp(rng.uniform(math.log(0.001), math.log(0.1), shape))
        drawn = dt + np.log(-np.expm1(-dt))
    elif values == "decay":
        drawn = -rng.uniform(1, 16, shape)
    elif values == "conv":
        drawn = rng.uniform(-0.5, 0.5, shape)
    elif values == "normal":
        drawn = rng.normal(0, DEVIATION, shape)
    else:
        drawn = np.full(shape, {"one": 1.0, "zero": 0.0}[values])
    return np.asarray(drawn, np.float32)


@dataclass(frozen=True)
class Census:
    """What a file holds: bytes by type, and what decoding one token reads of its weights."""

    bytes_by_type: dict[str, int]
    tensors_by_type: dict[str, int]
    parameters: int
    active_parameters: int
    active_bytes: int

    def pure(self, kind: str) -> bool:
        """Whether everything but float32 side tensors, under 1 % of the bytes, is of this type."""
        plain = self.bytes_by_type.get("f32", 0)
        return self.bytes_by_type.keys() == {kind, "f32"} and plain < 0.01 * self.total

    @property
    def total(self) -> int:
        return sum(self.bytes_by_type.values())


def census(path: Path) -> Census:
    """Count the tensors of any GGUF file of this architecture, ours or converted."""
    reader = gguf.GGUFReader(path)
    used, experts = (int(_field(reader, f"{ARCHITECTURE}.expert{n}_count")) for n in ("_used", ""))
    names = {str(t.name) for t in reader.tensors}
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    parameters = active_parameters = active_bytes = 0
    for t in reader.tensors:
        type_, n, nbytes = t.tensor_type.name.lower(), int(t.n_elements), int(t.n_bytes)
        sizes[type_] = sizes.get(type_, 0) + nbytes
        counts[type_] = counts.get(type_, 0) + 1
        parameters += n
        if t.name == "token_embd.weight" and "output.weight" in names:
            continue  # one row is looked up
        share = used / experts if "_exps." in t.name else 1.0
        active_parameters += round(n * share)
        active_bytes += round(nbytes * share)
    return Census(sizes, counts, parameters, active_parameters, active_bytes)


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise SystemExit(f"no {name} in the file: not of the architecture {ARCHITECTURE}?")
    return field.contents()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="config.json, or the directory that has it")
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--type", choices=sorted(TYPES), default="q4_0")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print what a file holds instead")
    options = parser.parse_args()
    if options.show is None:
        if options.out is None:
            parser.error("MODEL and OUT are needed")
        model = options.model
        spec = load_spec(model) if model.is_dir() else spec_from_config(json.loads(model.read_text()))
        write(spec, options.out, options.type)
    counted = census(options.show or options.out)
    print(json.dumps({**asdict(counted), "total_bytes": counted.total}, indent=1))


if __name__ == "__main__":
    main()
