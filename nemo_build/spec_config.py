# SPDX-License-Identifier: Apache-2.0
"""Reading ``config.json`` and ``generation_config.json`` into a :class:`nemo_build.spec.ModelSpec`.

:mod:`nemo_build.config_fields` holds the tables of known fields. All problems are reported at once.

Where two readers of the same field disagree we follow the model's authors:

* ``time_step_limit`` (default 0 .. infinity) clamps dt everywhere. transformers ignores it and clamps the
  prefill, but not the decode, at ``time_step_min``, which was only ever meant for initialisation.
* ``use_bias`` decides the biases of the Mamba projections; ``mamba_proj_bias`` must agree with it.
* ``residual_in_fp32`` is read by no public runtime for this architecture; either value is accepted.
* Attention has no positions: ``rope_theta`` and ``partial_rotary_factor`` are leftovers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_build.config_fields import (
    ACTIVATION,
    GENERATION_KNOWN,
    GENERATION_MUST_BE,
    KNOWN,
    MUST_BE,
    Fields,
    comparable,
    show,
    to_float,
)
from nemo_build.errors import ConfigError
from nemo_build.spec import (
    AttentionSpec,
    BlockKind,
    GenerationDefaults,
    MambaSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    MtpSpec,
)

ARCHITECTURE = "NemotronHForCausalLM"

_PATTERN = {"M": BlockKind.MAMBA, "*": BlockKind.ATTENTION, "E": BlockKind.MOE, "-": BlockKind.MLP}
_BLOCK_NAMES = {
    **{str(kind): kind for kind in BlockKind},
    "linear_attention": BlockKind.MAMBA,
    "full_attention": BlockKind.ATTENTION,
}


def read_files(directory: Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Parse the two JSON files of a checkpoint; the second one may be absent (None).

    Raises ConfigError if ``config.json`` is missing, or if either file is not one JSON object.
    """
    problems: list[str] = []
    config = _read_object(directory / "config.json", problems)
    if config is None and not problems:
        raise ConfigError(
            f"{directory}: no config.json",
            hint="Give the directory of a Hugging Face checkpoint: config.json next to *.safetensors.",
        )
    generation = _read_object(directory / "generation_config.json", problems)
    if problems or config is None:
        raise ConfigError(f"{directory}: the configuration cannot be read", problems)
    return config, generation


def _read_object(path: Path, problems: list[str]) -> dict[str, Any] | None:
    """One JSON object; None if the file does not exist or, with a problem noted, is not one."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"field given more than once: {', '.join(map(show, twice))}")
        return result

    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        problems.append(f"{path.name}: {error.strerror}")
        return None
    if raw.startswith(b"version https://git-lfs"):
        problems.append(f"{path.name}: a git-lfs pointer, not the file itself (run `git lfs pull`)")
        return None
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError:
        problems.append(f"{path.name}: not JSON: nested too deeply")
        return None
    except ValueError as error:  # bad JSON, bad UTF-8, absurdly long integers
        problems.append(f"{path.name}: not JSON: {error}")
        return None
    if not isinstance(value, dict):
        problems.append(f"{path.name}: expected a JSON object, found {show(value)}")
        return None
    return value


def build_spec(config: Mapping[str, Any], generation: Mapping[str, Any] | None, source: str) -> ModelSpec:
    """Build the spec, or raise one ConfigError that lists every problem. `source` heads the message."""
    fields = Fields(config)
    trunk = _read_layers(fields, "layers_block_type", "hybrid_override_pattern")
    stated = fields.optional_integer("num_hidden_layers")
    read = fields.good("num_hidden_layers", "layers_block_type", "hybrid_override_pattern")
    if read and stated is not None and stated != len(trunk):
        fields.problem("num_hidden_layers", f"{stated}, but the layer list has {len(trunk)} layers")
    mtp = _read_mtp(fields)
    kinds = frozenset(trunk) | frozenset(mtp.layers if mtp else ())
    _check_fixed(fields, kinds)
    vocab_size = fields.integer("vocab_size")
    spec = ModelSpec(
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        layers=trunk,
        norm_eps=fields.number("layer_norm_epsilon", above=0.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
        max_positions=fields.integer("max_position_embeddings"),
        dtype=fields.dtype("dtype", default="bfloat16"),
        mamba=_read_mamba(fields) if BlockKind.MAMBA in kinds else None,
        attention=_read_attention(fields) if BlockKind.ATTENTION in kinds else None,
        moe=_read_moe(fields) if BlockKind.MOE in kinds else None,
        mlp=_read_mlp(fields) if BlockKind.MLP in kinds else None,
        mtp=mtp,
        generation=_read_generation(fields, generation or {}, vocab_size),
    )
    fields.finish(KNOWN, f"{source}: this configuration cannot be honoured", "model")
    return spec


def _read_layers(fields: Fields, list_name: str, pattern_name: str) -> tuple[BlockKind, ...]:
    """The block kinds from the list, the pattern string, or both if they agree.

    With a problem noted it returns what could be read, so that the blocks' own fields are still checked.
    """
    names, pattern = fields.raw(list_name), fields.raw(pattern_name)
    if names is None and pattern is None:
        fields.problem(list_name, f"missing (also accepted as the string {pattern_name})")
        return ()
    kinds: list[tuple[BlockKind, ...]] = []
    if names is not None:
        kinds.append(_from_list(fields, list_name, names))
    if pattern is not None:
        kinds.append(_from_pattern(fields, pattern_name, pattern))
    if len(kinds) == 2 and kinds[0] != kinds[1] and fields.good(list_name, pattern_name):
        unequal = (i for i, (a, b) in enumerate(zip(*kinds, strict=False)) if a is not b)
        where = next(unequal, min(map(len, kinds)))
        fields.problem(list_name, f"differs from {pattern_name} at layer {where}")
    return kinds[0]


def _from_list(fields: Fields, name: str, value: object) -> tuple[BlockKind, ...]:
    if not isinstance(value, list) or not value:
        fields.problem(name, f"expected a list of block names, found {show(value)}")
        return ()
    kinds: list[BlockKind] = []
    for i, item in enumerate(value):
        kind = _BLOCK_NAMES.get(item) if isinstance(item, str) else None
        if kind is None:
            fields.problem(name, f"layer {i} is {show(item)}, not one of {', '.join(_BLOCK_NAMES)}")
        else:
            kinds.append(kind)
    return tuple(kinds)


def _from_pattern(fields: Fields, name: str, value: object) -> tuple[BlockKind, ...]:
    if not isinstance(value, str) or not value:
        fields.problem(name, f'expected a string such as "MEM*E", found {show(value)}')
        return ()
    for i, character in enumerate(value):
        if character not in _PATTERN:
            legend = ", ".join(f"{c} ({kind})" for c, kind in _PATTERN.items())
            fields.problem(name, f"character {show(character)} at position {i} is none of {legend}")
    return tuple(_PATTERN[c] for c in value if c in _PATTERN)


def _read_mtp(fields: Fields) -> MtpSpec | None:
    modules = fields.integer("num_nextn_predict_layers", default=0, minimum=0)
    if modules == 0 or not fields.good("num_nextn_predict_layers"):
        return None  # transformers writes a list of MTP layers even where there is no module
    return MtpSpec(_read_layers(fields, "mtp_layers_block_type", "mtp_hybrid_override_pattern"), modules)


def _check_fixed(fields: Fields, kinds: frozenset[BlockKind]) -> None:
    """Note fields whose value is not the one that is implemented."""
    model_type = fields.required("model_type")
    if model_type not in (None, "nemotron_h"):
        fields.problem("model_type", f'{show(model_type)}, but only "nemotron_h" is supported')
    architectures = fields.raw("architectures")
    if architectures not in (None, [ARCHITECTURE]):
        fields.problem("architectures", f'{show(architectures)}, but only ["{ARCHITECTURE}"] is supported')
    for name, (wanted, scope) in MUST_BE.items():
        value = fields.raw(name)
        same = value == wanted and isinstance(value, bool) == isinstance(wanted, bool)
        if value is not None and not same and (scope is None or kinds.intersection(scope)):
            fields.problem(name, f"{show(value)}, but only {show(wanted)} is supported")


def _read_mamba(fields: Fields) -> MambaSpec:
    bias = fields.flag("use_bias", default=False)
    proj_bias = fields.flag("mamba_proj_bias", default=bias)
    if proj_bias is not bias and fields.good("use_bias", "mamba_proj_bias"):
        fields.problem("mamba_proj_bias", f"{show(proj_bias)}, but use_bias, which decides, is {show(bias)}")
    spec = MambaSpec(
        num_heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("mamba_head_dim"),
        state_size=fields.integer("ssm_state_size"),
        num_groups=fields.integer("n_groups"),
        conv_kernel=fields.integer("conv_kernel"),
        conv_bias=fields.flag("use_conv_bias", default=True),
        proj_bias=bias,
        dt_limit=_read_dt_limit(fields),
        state_dtype=fields.dtype("mamba_ssm_cache_dtype", default="float32"),
        chunk_size=fields.integer("chunk_size", default=128),
    )
    # This makes the groups divide the inner size too, which the grouped norm needs.
    if fields.good("mamba_num_heads", "n_groups") and spec.num_heads % spec.num_groups:
        fields.problem("n_groups", f"{spec.num_groups} does not divide mamba_num_heads = {spec.num_heads}")
    return spec


def _read_dt_limit(fields: Fields) -> tuple[float, float]:
    value = fields.raw("time_step_limit")
    if value is None:
        return (0.0, math.inf)
    numbers = [to_float(v) for v in value] if isinstance(value, list) else []
    if len(numbers) == 2 and numbers[0] is not None and numbers[1] is not None:
        low, high = numbers[0], numbers[1]
        if 0 <= low < high:
            return (low, high)
    fields.problem("time_step_limit", f"expected two numbers with 0 <= low < high, found {show(value)}")
    return (0.0, math.inf)


def _read_attention(fields: Fields) -> AttentionSpec:
    heads = fields.integer("num_attention_heads")
    null = "num_key_value_heads" in fields.config and fields.raw("num_key_value_heads") is None
    kv_heads = heads if null else fields.integer("num_key_value_heads")  # null: one for each query head
    if fields.good("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        fields.problem("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=fields.integer("head_dim"))


def _read_moe(fields: Fields) -> MoeSpec:
    spec = MoeSpec(
        num_experts=fields.integer("n_routed_experts"),
        top_k=fields.integer("num_experts_per_tok"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
        latent_size=fields.optional_integer("moe_latent_size"),
        num_expert_groups=fields.integer("n_group", default=1),
        top_expert_groups=fields.integer("topk_group", default=1),
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        scaling_factor=fields.number("routed_scaling_factor", above=0.0),
        activation=ACTIVATION,
        bias=fields.flag("mlp_bias", default=False),
    )
    if fields.good("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group"):
        _check_routing(fields, spec)
    return spec


def _check_routing(fields: Fields, spec: MoeSpec) -> None:
    experts, groups, chosen = spec.num_experts, spec.num_expert_groups, spec.top_expert_groups
    if experts % groups:
        fields.problem("n_group", f"{groups} does not divide n_routed_experts = {experts}")
        return
    size = experts // groups
    if groups > 1 and size < 2:  # a group is scored by its two best experts
        fields.problem("n_group", f"{groups} groups of {experts} experts: each must have two or more")
    if chosen > groups:
        fields.problem("topk_group", f"{chosen} is more than n_group = {groups}")
    elif spec.top_k > chosen * size:
        reach = f"the {chosen * size} experts in topk_group = {chosen} of n_group = {groups} groups"
        limit = reach if groups > 1 else f"n_routed_experts = {experts}"
        fields.problem("num_experts_per_tok", f"{spec.top_k} is more than {limit}")


def _read_mlp(fields: Fields) -> MlpSpec:
    return MlpSpec(
        intermediate_size=fields.integer("intermediate_size"),
        activation=ACTIVATION,
        bias=fields.flag("mlp_bias", default=False),
    )


def _read_generation(fields: Fields, generation: Mapping[str, Any], vocab_size: int) -> GenerationDefaults:
    """Sampling defaults; ids of both files, those of ``generation_config.json`` first."""
    own = Fields(generation)
    limit = vocab_size if fields.good("vocab_size") else None
    ends = dict.fromkeys(_token_ids(own, "eos_token_id", limit) + _token_ids(fields, "eos_token_id", limit))
    single: dict[str, int | None] = {}
    for name in ("bos_token_id", "pad_token_id"):
        ids = _token_ids(own, name, limit, one=True) or _token_ids(fields, name, limit, one=True)
        single[name] = ids[0] if ids else None
    temperature = _optional_number(own, "temperature", 0.0, math.inf)
    if own.flag("do_sample", default=True) is False:
        temperature = 0.0
    top_p = _optional_number(own, "top_p", 0.0, 1.0)
    if top_p == 0:
        own.problem("top_p", "0 leaves no token to choose")
    top_k = own.optional_integer("top_k", minimum=-1)
    for name in sorted(generation.keys() & GENERATION_MUST_BE.keys()):
        value, wanted = generation[name], GENERATION_MUST_BE[name]
        if value is not None and comparable(value) != wanted:
            own.problem(name, f"{show(value)}, but only {show(wanted)} is supported as a default")
    own.report_unknown(GENERATION_KNOWN)
    fields.any_unknown |= own.any_unknown
    fields.problems += [f"generation_config.json: {p}" for p in own.problems]
    return GenerationDefaults(
        eos_token_ids=tuple(ends),
        bos_token_id=single["bos_token_id"],
        pad_token_id=single["pad_token_id"],
        temperature=temperature,
        top_p=top_p,
        top_k=top_k if top_k is not None and top_k > 0 else None,  # 0 and -1 are the usual words for "off"
    )


def _token_ids(fields: Fields, name: str, limit: int | None, one: bool = False) -> list[int]:
    """The ids of a field that is a token id or (unless `one`) a list of them; [] if absent or bad."""
    value = fields.raw(name)
    ids = value if isinstance(value, list) and not one else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or token < 0 or (limit is not None and token >= limit):
            size = "" if limit is None else f" below the vocabulary's size {limit}"
            fields.problem(name, f"expected token ids{size}, found {show(value)}")
            return []
    return ids


def _optional_number(fields: Fields, name: str, low: float, high: float) -> float | None:
    """A finite number in [low, high], or None if absent."""
    value = fields.raw(name)
    number = to_float(value)
    if value is None or (number is not None and low <= number <= high and number < math.inf):
        return number
    upper = "" if high == math.inf else f" and at most {high:g}"
    fields.problem(name, f"expected a finite number of at least {low:g}{upper}, found {show(value)}")
    return None
