# SPDX-License-Identifier: Apache-2.0
"""What a Nemotron-H model is made of, as every stage sees it.

A :class:`ModelSpec` is plain data: frozen, comparable, and exact through JSON. It is read from a checkpoint's
``config.json`` by :func:`load_spec`; the rules for reading (spellings, policy for unknown fields, checks) are
in :mod:`nemo_build.spec_config`. This module imports the standard library only.

Shapes use these letters elsewhere: B batch, L tokens, H heads, P head width, N state size, G groups.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from nemo_build.errors import ConfigError

_TAG = "__float__"
_TAGGED = {"Infinity": math.inf, "-Infinity": -math.inf}


class BlockKind(StrEnum):
    """The mixer of one layer; every layer is ``x + mixer(norm(x))`` with exactly one mixer."""

    MAMBA = "mamba"
    ATTENTION = "attention"
    MOE = "moe"
    MLP = "mlp"


@dataclass(frozen=True)
class MambaSpec:
    """A Mamba-2 mixer. ``in_proj`` yields z | x | B | C | dt in that order; x | B | C go through the conv."""

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool  # in_proj and out_proj
    dt_limit: tuple[float, float]  # clamp of softplus(dt + dt_bias), in prefill and in decode alike
    state_dtype: str  # dtype asked for the recurrent state, a torch name such as "float32"
    chunk_size: int  # a hint for chunked scans; never changes the result beyond rounding

    @property
    def inner_size(self) -> int:
        """Channels of z and of x: heads times head width (not ``expand`` times the hidden size)."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def in_proj_size(self) -> int:
        """Rows of ``in_proj``: z, then the convolution's channels, then one dt a head."""
        return self.inner_size + self.conv_dim + self.num_heads


@dataclass(frozen=True)
class AttentionSpec:
    """Causal grouped-query attention without biases, positions or query/key norms."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        """Factor on the logits before the softmax."""
        scale: float = self.head_dim**-0.5
        return scale


@dataclass(frozen=True)
class MoeSpec:
    """Routed experts plus one shared expert, each up -> activation -> down without a gate.

    With ``latent_size`` the routed experts (never the shared one) work on a projection of that width.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int
    latent_size: int | None
    num_expert_groups: int
    top_expert_groups: int
    norm_topk_prob: bool
    scaling_factor: float
    activation: str
    bias: bool  # shared expert and latent projections; routed experts never have one


@dataclass(frozen=True)
class MlpSpec:
    """A dense up -> activation -> down block without a gate."""

    intermediate_size: int
    activation: str
    bias: bool


@dataclass(frozen=True)
class MtpSpec:
    """Multi-token prediction: ``num_modules`` stored modules, each made of ``layers`` in order."""

    layers: tuple[BlockKind, ...]
    num_modules: int


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request gets when it does not say otherwise.

    ``eos_token_ids`` are all ids that end a turn. ``temperature`` is 0 where ``do_sample`` is false. ``None``
    means that the checkpoint does not say; for ``top_k`` it also means "off".
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A whole model. A section is ``None`` when neither the trunk nor the MTP modules have such a block."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[BlockKind, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_positions: int
    dtype: str  # a torch dtype name: "bfloat16", "float16" or "float32"
    mamba: MambaSpec | None
    attention: AttentionSpec | None
    moe: MoeSpec | None
    mlp: MlpSpec | None
    mtp: MtpSpec | None
    generation: GenerationDefaults

    def indices(self, kind: BlockKind) -> tuple[int, ...]:
        """Indices of the trunk's layers of this kind."""
        return tuple(i for i, k in enumerate(self.layers) if k is kind)

    def to_json(self) -> dict[str, Any]:
        """The spec as standard JSON data; an infinite float becomes ``{"__float__": "Infinity"}``."""
        encoded: dict[str, Any] = encode(self)
        return encoded

    @classmethod
    def from_json(cls, data: object) -> ModelSpec:
        """The inverse of :meth:`to_json`. Raises ConfigError if `data` is anything else."""
        spec: ModelSpec = decode(cls, data, "spec")
        return spec


def load_spec(directory: Path) -> ModelSpec:
    """Read ``config.json`` and, where there is one, ``generation_config.json`` of a checkpoint.

    Raises ConfigError, naming every problem, if a file is missing or damaged or a field cannot be honoured.
    """
    from nemo_build import spec_config

    config, generation = spec_config.read_files(directory)
    return spec_config.build_spec(config, generation, source=str(directory))


def spec_from_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelSpec:
    """Build a spec from parsed ``config.json`` and ``generation_config.json`` data.

    Raises ConfigError naming every field that is missing, malformed, contradictory or unknown.
    """
    from nemo_build import spec_config

    return spec_config.build_spec(config, generation, source="config.json")


def decode_float(value: object) -> object:
    """Undo the ways a config writes a float that JSON lacks: a ``__float__`` object, or a string."""
    if isinstance(value, Mapping) and set(value) == {_TAG}:
        tag = value[_TAG]
        return _TAGGED.get(tag, value) if isinstance(tag, str) else value
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def encode(value: Any) -> Any:
    """A spec, or a part of one, as standard JSON data."""
    if is_dataclass(value):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple):
        return [encode(v) for v in value]
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {_TAG: "Infinity" if value > 0 else "-Infinity"}
    return value


def decode(kind: Any, value: Any, where: str) -> Any:
    """The inverse of :func:`encode` for the few types that specs use; raises ConfigError naming `where`."""
    if isinstance(kind, types.UnionType):  # X | None
        return None if value is None else decode(get_args(kind)[0], value, where)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        if not isinstance(value, Mapping) or set(value) != set(hints):
            raise _malformed(where, f"an object with the fields {', '.join(hints)}", value)
        return kind(**{name: decode(hint, value[name], f"{where}.{name}") for name, hint in hints.items()})
    if get_origin(kind) is tuple:
        args = get_args(kind)
        if not isinstance(value, list) or (args[-1] is not Ellipsis and len(value) != len(args)):
            raise _malformed(where, "a list", value)
        return tuple(decode(args[0], v, f"{where}[{i}]") for i, v in enumerate(value))
    if kind is float:
        value = decode_float(value) if isinstance(value, Mapping) else value
    elif isinstance(kind, type) and issubclass(kind, StrEnum) and isinstance(value, str):
        value = kind(value) if value in set(kind) else value
    if type(value) is not kind:
        raise _malformed(where, f"a {kind.__name__}", value)
    return value


def _malformed(where: str, wanted: str, value: object) -> ConfigError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    problem = f"{where}: expected {wanted}, found {shown}"
    return ConfigError("a stored model description is damaged", [problem])
