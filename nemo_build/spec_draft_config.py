# SPDX-License-Identifier: Apache-2.0
"""Reading a drafter's ``config.json`` into a :class:`nemo_build.spec_draft.DraftSpec`.

Writers of these files put one fact under several names, at the top and in a ``dflash_config`` object; all that are
there must agree. Where a field is absent, what the trainers of the family take holds:

* ``sample_from_anchor`` is true for DSpark, false for DFlash; ``dspark_bonus_anchor`` is its opposite.
* Tokens of a block see each other unless something says causal.
* Layers see everything unless ``layer_types`` or ``use_swa`` says otherwise.
* Embeddings and output head are the drafter's own if its checkpoint has them, else the target's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nemo_build.config_fields import IRRELEVANT, Fields, comparable, flatten, show, to_float, words
from nemo_build.spec import ModelSpec
from nemo_build.spec_draft import DraftKind, DraftSpec, RotarySpec, YarnSpec

ARCHITECTURES = {"DFlashDraftModel": DraftKind.DFLASH, "Qwen3DSparkModel": DraftKind.DSPARK}

_NESTED = ("dflash_config", "rope_parameters", "rope_scaling")


def _in_dflash(*names: str) -> tuple[str, ...]:
    """Each name at the top and in ``dflash_config``."""
    return tuple(spelling for n in names for spelling in (n, f"dflash_config.{n}"))


def _in_rope(*names: str) -> tuple[str, ...]:
    """Each name in the two objects that describe positions."""
    return tuple(f"{nested}.{n}" for nested in ("rope_parameters", "rope_scaling") for n in names)


# Fields with several spellings: the one used in messages -> all. Those that are present must agree.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "dtype": ("dtype", "torch_dtype"),
    "mask_token_id": (*_in_dflash("mask_token_id"), "pard_token"),
    "target_layer_ids": _in_dflash("target_layer_ids"),
    "causal": ("dflash_config.causal", "dflash_query_causal", "is_causal"),
    "attention_sink_bias": _in_dflash("attention_sink_bias"),
    "sliding_window": ("sliding_window", "dflash_config.swa_window_size"),
    "use_swa": ("dflash_config.use_swa",),
    "sample_from_anchor": _in_dflash("sample_from_anchor"),
    "block_size": _in_dflash("block_size"),
    "markov_rank": (*_in_dflash("markov_rank"), "dspark_markov_rank"),
    "markov_head_type": _in_dflash("markov_head_type"),
    "enable_confidence_head": (*_in_dflash("enable_confidence_head"), "dspark_confidence_head"),
    "confidence_head_with_markov": _in_dflash("confidence_head_with_markov"),
    "rope_theta": ("rope_theta", *_in_rope("rope_theta")),
    "rope_type": _in_rope("rope_type", "type"),
    "partial_rotary_factor": ("partial_rotary_factor", *_in_rope("partial_rotary_factor")),
    **{
        name: _in_rope(name)
        for name in (
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "truncate",
        )
    },
}

HONOURED = words(
    """
    architectures model_type vocab_size draft_vocab_size hidden_size target_hidden_size num_hidden_layers
    num_target_layers layer_types num_attention_heads num_key_value_heads head_dim intermediate_size rms_norm_eps
    max_position_embeddings eagle_aux_hidden_state_layer_ids num_aux_layers dspark_bonus_anchor
    has_embed_tokens has_lm_head use_sliding_window
    """
).union(*ALIASES.values())

# Fields with one implemented value.
MUST_BE: dict[str, object] = {
    "model_type": "qwen3",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1,
    "markov_head_type": "vanilla",
    "dspark_fixup_head_type": "markov",
    "dflash_config.use_aux_hidden_state": True,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
}

# How it was trained, what the target's configuration decides, and the objects whose fields are looked at one by one.
WITHOUT_EFFECT = words(
    """
    train_embed_tokens num_anchors max_window_layers tie_word_embeddings bos_token_id eos_token_id pad_token_id
    dflash_config rope_parameters rope_scaling
    """
)

# How a head that is refused differs from the one that is implemented.
_HEADS = {
    "gated": "it scales the previous token's embedding by a gate over the hidden state",
    "rnn": "it carries a state from token to token",
}

KNOWN = HONOURED | IRRELEVANT | WITHOUT_EFFECT | MUST_BE.keys()


def build_draft(config: Mapping[str, Any], target: ModelSpec, source: str) -> DraftSpec:
    """Build the spec of a drafter for `target`, or raise one ConfigError that lists every problem."""
    fields = Fields(flatten(config, *_NESTED), ALIASES)
    kind, architecture = _read_kind(fields)
    _check_fixed(fields)
    heads, kv_heads, head_dim = _read_heads(fields)
    markov_rank = fields.integer("markov_rank", default=0, minimum=0)
    spec = DraftSpec(
        kind=kind,
        architecture=architecture,
        vocab_size=_same_as_target(fields, "vocab_size", target.vocab_size),
        hidden_size=_same_as_target(fields, "hidden_size", target.hidden_size),
        taps=_read_taps(fields, target),
        windows=_read_windows(fields),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps", above=0.0),
        rotary=_read_rotary(fields, head_dim),
        causal=fields.flag("causal", default=False),
        sinks=fields.flag("attention_sink_bias", default=False),
        mask_token_id=_read_mask(fields, target),
        block_size=fields.optional_integer("block_size", minimum=2),
        sample_from_anchor=_read_anchor(fields, kind),
        markov_rank=markov_rank,
        confidence=_read_confidence(fields, markov_rank),
        own_embeddings=_optional_flag(fields, "has_embed_tokens"),
        own_head=_optional_flag(fields, "has_lm_head"),
        max_positions=fields.integer("max_position_embeddings"),
        dtype=fields.dtype("dtype", default="bfloat16"),
    )
    _check_sizes(fields, target)
    fields.finish(KNOWN, f"{source}: this drafter cannot be honoured", "drafter")
    return spec


def _read_kind(fields: Fields) -> tuple[DraftKind, str]:
    value = fields.required("architectures")
    for name, kind in ARCHITECTURES.items():
        if value == [name]:
            return kind, name
    if value is not None:
        wanted = " or ".join(show([name]) for name in ARCHITECTURES)
        fields.problem("architectures", f"{show(value)}, but a drafter is {wanted}")
    return DraftKind.DFLASH, ""


def _check_fixed(fields: Fields) -> None:
    """Note fields whose value is not the one that is implemented."""
    fields.required("model_type")
    for name in _NESTED:
        if fields.raw(name) is not None:
            fields.problem(name, f"expected an object, found {show(fields.raw(name))}")
    for name, wanted in MUST_BE.items():
        value = fields.raw(name)
        if value is None or (
            comparable(value) == wanted and isinstance(value, bool) is isinstance(wanted, bool)
        ):
            continue
        why = f" ({_HEADS[value]})" if isinstance(value, str) and value in _HEADS else ""
        fields.problem(name, f"{show(value)}, but only {show(wanted)} is supported{why}")


def _same_as_target(fields: Fields, name: str, wanted: int) -> int:
    value = fields.integer(name)
    if fields.good(name) and value != wanted:
        fields.problem(name, f"{value}, but the target's is {wanted}")
    return value


def _check_sizes(fields: Fields, target: ModelSpec) -> None:
    """Note what is said a second time, of drafter or target, and differs."""
    stated = {
        "draft_vocab_size": (target.vocab_size, "a drafter with a vocabulary of its own is not supported"),
        "target_hidden_size": (target.hidden_size, "the target's hidden size"),
        "num_target_layers": (len(target.layers), "the target's number of layers"),
    }
    for name, (wanted, what) in stated.items():
        value = fields.optional_integer(name)
        if value is not None and fields.good(name) and value != wanted:
            fields.problem(name, f"{value}, but only {wanted} will do: {what}")


def _read_heads(fields: Fields) -> tuple[int, int, int]:
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads")
    head_dim = fields.integer("head_dim", minimum=2)
    if fields.good("num_attention_heads", "num_key_value_heads") and heads % kv_heads:
        fields.problem("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads = {heads}")
    if fields.good("head_dim") and head_dim % 2:
        fields.problem("head_dim", f"{head_dim} is odd: rotary positions turn pairs")
    return heads, kv_heads, head_dim


def _read_taps(fields: Fields, target: ModelSpec) -> tuple[int, ...]:
    """Indices of the target's layers; ``eagle_aux_hidden_state_layer_ids`` names the layers that read them."""
    taps = _integers(fields, "target_layer_ids")
    readers = _integers(fields, "eagle_aux_hidden_state_layer_ids")
    if readers and taps and [r - 1 for r in readers] != taps:
        fields.problem(
            "eagle_aux_hidden_state_layer_ids", f"{show(readers)} is not target_layer_ids plus one"
        )
    taps = taps or [r - 1 for r in readers]
    if not taps and fields.good("target_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        fields.problem("target_layer_ids", "missing (also accepted in dflash_config)")
    outside = [t for t in taps if not 0 <= t < len(target.layers)]
    if outside:
        fields.problem(
            "target_layer_ids", f"{show(outside)}: the target has layers 0 to {len(target.layers) - 1}"
        )
    count = fields.optional_integer("num_aux_layers")
    if count is not None and taps and count != len(taps):
        fields.problem("num_aux_layers", f"{count}, but {len(taps)} layers are listed")
    return tuple(taps)


def _integers(fields: Fields, name: str) -> list[int]:
    """A list of whole numbers; [] if absent, or bad with a problem noted."""
    value = fields.raw(name)
    if value is None:
        return []
    if not isinstance(value, list) or not value or any(type(v) is not int for v in value):
        fields.problem(name, f"expected a list of whole numbers, found {show(value)}")
        return []
    return value


def _read_windows(fields: Fields) -> tuple[int, ...]:
    """For each layer its window, 0 for none."""
    layers = fields.integer("num_hidden_layers")
    sliding = fields.flag("use_swa", default=False)
    types = fields.raw("layer_types")
    if types is None:
        if fields.flag("use_sliding_window", default=False):
            fields.problem("layer_types", "missing, but use_sliding_window is true: which layers slide?")
        types = ["sliding_attention" if sliding else "full_attention"] * layers
    names = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(t not in names for t in types):
        fields.problem("layer_types", f"expected a list of {' and '.join(names)}, found {show(types)}")
        return ()
    if fields.good("num_hidden_layers") and len(types) != layers:
        fields.problem("num_hidden_layers", f"{layers}, but layer_types has {len(types)} layers")
    if fields.raw("use_swa") is not None and fields.good("use_swa") and sliding is not (names[1] in types):
        fields.problem("use_swa", f"{show(sliding)}, but layer_types says otherwise")
    window = fields.integer("sliding_window") if names[1] in types else 0
    return tuple(window if t == names[1] else 0 for t in types)


def _read_rotary(fields: Fields, head_dim: int) -> RotarySpec:
    theta = fields.number("rope_theta", above=1.0)
    kind = fields.raw("rope_type")
    if kind not in (None, "default", "yarn"):
        fields.problem("rope_type", f'{show(kind)}, but only "default" and "yarn" are supported')
    return RotarySpec(theta, head_dim, _read_yarn(fields) if kind == "yarn" else None)


def _read_yarn(fields: Fields) -> YarnSpec:
    factor = fields.number("factor", above=0.0)
    original = fields.integer("original_max_position_embeddings")
    scale, both = _positive(fields, "mscale", 0.0), _positive(fields, "mscale_all_dim", 0.0)
    attention = _attention_scale(factor, scale) / _attention_scale(factor, both) if scale and both else None
    return YarnSpec(
        factor=factor,
        original_positions=original,
        beta_fast=_positive(fields, "beta_fast", 32.0),
        beta_slow=_positive(fields, "beta_slow", 1.0),
        attention_factor=_positive(fields, "attention_factor", attention or _attention_scale(factor, 1.0)),
        truncate=fields.flag("truncate", default=True),
    )


def _attention_scale(factor: float, scale: float) -> float:
    """The paper's rule for the temperature of attention at a longer context."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _positive(fields: Fields, name: str, default: float) -> float:
    """A finite number above 0, or the default if absent or 0."""
    value = to_float(fields.raw(name))
    return default if fields.raw(name) is None or value == 0 else fields.number(name, above=0.0)


def _read_mask(fields: Fields, target: ModelSpec) -> int:
    token = fields.integer("mask_token_id", minimum=0)
    if fields.good("mask_token_id") and token >= target.vocab_size:
        fields.problem("mask_token_id", f"{token} is not below the vocabulary's size {target.vocab_size}")
    return token


def _read_anchor(fields: Fields, kind: DraftKind) -> bool:
    """``sample_from_anchor``, which ``dspark_bonus_anchor`` says the other way round."""
    sample = _optional_flag(fields, "sample_from_anchor")
    bonus = _optional_flag(fields, "dspark_bonus_anchor")
    if sample is not None and sample is bonus:
        fields.problem("sample_from_anchor", f"{show(sample)}, but dspark_bonus_anchor, its opposite, is too")
    if sample is not None:
        return sample
    return kind is DraftKind.DSPARK if bonus is None else not bonus


def _read_confidence(fields: Fields, markov_rank: int) -> bool:
    confidence = fields.flag("enable_confidence_head", default=False)
    if not confidence:
        return False
    if not fields.flag("confidence_head_with_markov", default=True):
        fields.problem("confidence_head_with_markov", "false, but only true is supported")
    elif markov_rank == 0:
        fields.problem("enable_confidence_head", "true, but there is no Markov head (markov_rank) to feed it")
    return True


def _optional_flag(fields: Fields, name: str) -> bool | None:
    return None if fields.raw(name) is None else fields.flag(name, default=False)
