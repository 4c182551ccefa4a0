# SPDX-License-Identifier: Apache-2.0
"""Which fields a ``config.json`` may have, and typed access to them.

The tables below carry the policy: a field is honoured, or known to be irrelevant to inference, or has the one
value that is implemented; anything else is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from nemo_build.errors import ConfigError
from nemo_build.spec import BlockKind, decode_float

DTYPES = ("bfloat16", "float16", "float32")
ACTIVATION = "relu2"


def words(text: str) -> frozenset[str]:
    """The words of a text, as a table of names."""
    return frozenset(text.split())


# Honoured fields with several spellings: the one used in messages -> all. Those that are present must agree.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "layers_block_type": ("layers_block_type", "layer_types"),
    "layer_norm_epsilon": ("layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
    "dtype": ("dtype", "torch_dtype"),
    "n_groups": ("n_groups", "mamba_n_groups", "mamba_num_groups"),
    "ssm_state_size": ("ssm_state_size", "mamba_state_dim"),
    "conv_kernel": ("conv_kernel", "mamba_d_conv"),
    "use_conv_bias": ("use_conv_bias", "mamba_conv_bias"),
    "time_step_limit": ("time_step_limit", "mamba_dt_limit"),
    "chunk_size": ("chunk_size", "mamba_chunk_size"),
    "num_key_value_heads": ("num_key_value_heads", "num_query_groups"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "n_routed_experts": ("n_routed_experts", "num_local_experts"),
}
HONOURED = words(
    """
    architectures model_type vocab_size hidden_size num_hidden_layers hybrid_override_pattern
    tie_word_embeddings max_position_embeddings eos_token_id bos_token_id pad_token_id
    mamba_num_heads mamba_head_dim use_bias mamba_proj_bias mamba_ssm_cache_dtype
    num_attention_heads
    num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size moe_latent_size
    n_group topk_group norm_topk_prob routed_scaling_factor mlp_bias intermediate_size
    num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern
    """
).union(*ALIASES.values())

# Fields with one implemented value: (value, the block kinds for which it matters; None = always).
MUST_BE: dict[str, tuple[object, tuple[BlockKind, ...] | None]] = {
    "attention_bias": (False, (BlockKind.ATTENTION,)),
    "sliding_window": (None, (BlockKind.ATTENTION,)),
    "rope_scaling": (None, (BlockKind.ATTENTION,)),
    "rope_parameters": (None, (BlockKind.ATTENTION,)),
    "n_shared_experts": (1, (BlockKind.MOE,)),
    "mamba_hidden_act": ("silu", (BlockKind.MAMBA,)),
    "mlp_hidden_act": (ACTIVATION, (BlockKind.MLP, BlockKind.MOE)),
    "hidden_act": (ACTIVATION, (BlockKind.MLP, BlockKind.MOE)),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
}

# Training, initialisation, the bookkeeping of transformers, and sampling defaults, which transformers too
# takes from generation_config.json only. Quantization is read from the checkpoint's own description.
IRRELEVANT = words(
    """
    attention_dropout hidden_dropout initializer_range rescale_prenorm_residual residual_in_fp32
    expand mamba_expand time_step_min time_step_max time_step_floor mamba_dt_min mamba_dt_max
    mamba_dt_init_floor moe_shared_expert_overlap output_router_logits router_aux_loss_coef
    rope_theta partial_rotary_factor use_cache num_logits_to_keep use_mamba_kernels keep_mtp_spec_in_bf16
    transformers_version auto_map quantization_config chunk_size_feed_forward id2label label2id problem_type
    num_labels output_attentions output_hidden_states return_dict torchscript is_decoder tokenizer_class
    task_specific_params finetuning_task name_or_path tie_encoder_decoder pruned_heads prefix sep_token_id
    decoder_start_token_id cross_attention_hidden_size use_bfloat16 tf_legacy_loss attn_implementation
    max_length min_length do_sample early_stopping num_beams temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens
    num_beam_groups diversity_penalty
    """
)
KNOWN = HONOURED | IRRELEVANT | MUST_BE.keys()

# generation_config.json: what leaves the logits alone only at one value, and all that is known.
GENERATION_MUST_BE: dict[str, object] = {
    **dict.fromkeys(words("repetition_penalty encoder_repetition_penalty typical_p guidance_scale"), 1),
    **dict.fromkeys(words("min_p epsilon_cutoff eta_cutoff diversity_penalty min_length min_new_tokens"), 0),
    **dict.fromkeys(words("no_repeat_ngram_size encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(words("num_beams num_return_sequences num_beam_groups"), 1),
    **dict.fromkeys(words("remove_invalid_values renormalize_logits token_healing"), False),
    **dict.fromkeys(
        words(
            """
            bad_words_ids force_words_ids forced_bos_token_id forced_eos_token_id suppress_tokens
            begin_suppress_tokens sequence_bias exponential_decay_length_penalty watermarking_config
            constraints stop_strings penalty_alpha dola_layers top_h
            """
        )
    ),
}
GENERATION_KNOWN = GENERATION_MUST_BE.keys() | words(
    """
    eos_token_id bos_token_id pad_token_id temperature top_p top_k do_sample
    transformers_version use_cache max_length max_new_tokens max_time early_stopping length_penalty
    output_attentions output_hidden_states output_scores output_logits return_dict_in_generate
    cache_implementation cache_config compile_config disable_compile prefill_chunk_size low_memory
    num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind
    assistant_early_exit assistant_ensemble_weight target_lookbehind is_assistant use_mtp speculation_type
    prompt_lookup_num_tokens max_matching_ngram_size continuous_batching_config decoder_start_token_id
    """
)


def show(value: object) -> str:
    """`value` as it stands in the JSON file, cut to at most 60 characters."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    text = text.encode("utf-8", "replace").decode("utf-8")  # JSON may hold half a surrogate pair
    return text if len(text) <= 60 else text[:57] + "..."


class Fields:
    """Typed access to a configuration that notes problems and goes on with a placeholder.

    Args:
        config: The fields. Those of a nested object may stand under dotted names, as :func:`flatten` makes them.
        aliases: Spellings of fields that have several; those of a ``config.json`` of the model by default.
    """

    def __init__(
        self, config: Mapping[str, Any], aliases: Mapping[str, tuple[str, ...]] | None = None
    ) -> None:
        self.config = config
        self._aliases = ALIASES if aliases is None else aliases
        self.problems: list[str] = []
        self._bad: set[str] = set()
        self.any_unknown = False

    def problem(self, name: str, text: str) -> None:
        """Note once what is wrong with the field `name`, which is shown as the file spells it."""
        spelling = next((s for s in self._aliases.get(name, ()) if self.config.get(s) is not None), name)
        line = f"{spelling}: {text}"
        if line not in self.problems:
            self.problems.append(line)
        self._bad.add(name)

    def good(self, *names: str) -> bool:
        """Whether all these fields were read without a problem, so that a cross-check makes sense."""
        return self._bad.isdisjoint(names)

    def raw(self, name: str) -> Any:
        """The value under any of the field's spellings, which must agree; None if absent or null."""
        found = [
            (s, self.config[s]) for s in self._aliases.get(name, (name,)) if self.config.get(s) is not None
        ]
        if not found:
            return None
        for spelling, value in found[1:]:
            if comparable(value) != comparable(found[0][1]):
                self.problem(name, f"{show(found[0][1])}, but {spelling} is {show(value)}")
        return found[0][1]

    def required(self, name: str) -> Any:
        """As :meth:`raw`, but absence is a problem."""
        value = self.raw(name)
        if value is None:
            others = self._aliases.get(name, ())[1:]
            self.problem(name, "missing" + (f" (also accepted as {', '.join(others)})" if others else ""))
        return value

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number of at least `minimum`; required unless there is a default."""
        value = self.required(name) if default is None else self.raw(name)
        if value is None:
            return 1 if default is None else default
        if type(value) is not int or value < minimum:
            self.problem(name, f"expected a whole number of at least {minimum}, found {show(value)}")
            return 1
        return value

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        """As :meth:`integer`, with None for a field that is absent or null."""
        return None if self.raw(name) is None else self.integer(name, minimum=minimum)

    def number(self, name: str, above: float) -> float:
        """A required, finite number greater than `above`."""
        value = to_float(self.required(name))
        if value is None or not above < value < math.inf:
            if self.good(name):
                self.problem(name, f"expected a finite number above {above:g}, found {show(self.raw(name))}")
            return 1.0
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is not None and not isinstance(value, bool):
            self.problem(name, f"expected true or false, found {show(value)}")
        return value if isinstance(value, bool) else default

    def dtype(self, name: str, default: str) -> str:
        """A floating-point dtype by its torch name, with or without the ``torch.`` prefix."""
        value = self.raw(name)
        if value is None:
            return default
        bare = value.removeprefix("torch.") if isinstance(value, str) else value
        if bare not in DTYPES:
            self.problem(name, f"expected one of {', '.join(DTYPES)}, found {show(value)}")
            return default
        return str(bare)

    def report_unknown(self, known: AbstractSet[str]) -> None:
        """Note every field outside `known`. A leading underscore marks a field private to its writer."""
        for name, value in self.config.items():
            if name not in known and not name.startswith("_"):
                shown = name if all(part.isidentifier() for part in name.split(".")) else show(name)
                self.problem(shown, f"unknown field, here {show(value)}")
                self.any_unknown = True

    def finish(self, known: AbstractSet[str], headline: str, what: str) -> None:
        """Raise one ConfigError that lists every problem, unknown fields included, if there are any.

        Args:
            known: Fields that are honoured.
            headline: What the message begins with.
            what: What the fields describe, for the hint.
        """
        self.report_unknown(known)
        if self.problems:
            hint = f"A field we do not know may change what the {what} computes. If it does not, delete it."
            raise ConfigError(headline, self.problems, hint if self.any_unknown else "")


def flatten(config: Mapping[str, Any], *nested: str) -> dict[str, Any]:
    """`config` with the fields of the objects called `nested` under dotted names.

    >>> flatten({"a": 1, "rope": {"theta": 2}}, "rope")
    {'a': 1, 'rope.theta': 2}
    """
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if name in nested and isinstance(value, Mapping):
            flat |= {f"{name}.{inner}": v for inner, v in value.items()}
        else:
            flat[name] = value
    return flat


def to_float(value: object) -> float | None:
    """`value` as a float if it is a number in one of the ways configs write one, else None. NaN is none."""
    value = decode_float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return None if math.isnan(value) else float(value)
    except OverflowError:
        return None


def comparable(value: object) -> object:
    """`value` with the spellings of floats undone, so that equal values compare equal."""
    return [decode_float(v) for v in value] if isinstance(value, list) else decode_float(value)
