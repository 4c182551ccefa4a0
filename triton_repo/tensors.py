# SPDX-License-Identifier: Apache-2.0
"""The tensors of the models of a step: one table, from which configurations and requests are made.

A step is one request for all sequences that take part in it. A row is a sequence; ``R`` rows, ``L`` new tokens of the
longest, ``K`` drafts of the one with most. Its steps are ``draft`` (takes in what was committed since, then drafts),
``verify`` (runs the target over new tokens and drafts, and chooses a token at each place that asks for one) and
``accept`` (how many drafts are what was chosen). Logits, hidden states and state never leave the process they are in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TensorSpec:
    """A tensor of a model.

    Attributes:
        name: Its name.
        type: Triton's name of its type, without ``TYPE_``.
        dims: Dimensions; -1 varies.
        optional: Whether a request may lack it.
    """

    name: str
    type: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model of a step: what it takes and gives."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class EnsembleSpec:
    """Models in a row; a tensor that one gives is what a later one takes by that name."""

    name: str
    models: tuple[ModelSpec, ...]
    outputs: tuple[str, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)

    def inputs(self) -> list[TensorSpec]:
        """What the ensemble is given: all that none of its models gives."""
        made = {o.name for m in self.models for o in m.outputs}
        found = {i.name: i for m in self.models for i in m.inputs if i.name not in made and not i.optional}
        return list(found.values())


def _rows(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "INT32", (-1,)) for name in names)


SLOT, TOKENS, LENGTHS, PAST, ACCEPTED, WANTED, WATCHED = _STEP = (
    TensorSpec("SLOT", "INT32", (-1,)),
    TensorSpec("TOKENS", "INT32", (-1, -1)),
    *_rows("LENGTHS", "PAST", "ACCEPTED", "WANTED", "WATCHED"),
)
"""Of each row: its state slot, new tokens ``[R, L]`` and how many, tokens before them, pending ones to commit, whether
a token is wanted after the last, and whether the drafter is told of it."""

KNOWN, KNOWN_LENGTHS, KNOWN_PAST, DRAFTS, PRICE = _DRAFTING = (
    TensorSpec("KNOWN", "INT32", (-1, -1)),
    *_rows("KNOWN_LENGTHS", "KNOWN_PAST", "DRAFTS"),
    TensorSpec("PRICE", "FP32", (1,)),
)
"""Of each row: what was committed since the drafter heard of it, with the token after that, and from which position;
how many drafts it may have. For all: what a draft must bring to be worth its place (0: nothing)."""

DRAFT, DRAFT_LENGTHS = _DRAFTED = (
    TensorSpec("DRAFT", "INT32", (-1, -1)),
    TensorSpec("DRAFT_LENGTHS", "INT32", (-1,)),
)
"""Drafts ``[R, K]`` and how many."""

TARGET = TensorSpec("TARGET", "INT32", (-1, -1))
"""What the target chose ``[R, K + 1]``, -1 where nothing; a row whose logits are unusable begins with -2."""

CHOSEN, ACCEPTED_DRAFTS = _CHOSEN = (
    TensorSpec("CHOSEN", "INT32", (-1, -1)),
    TensorSpec("ACCEPTED_DRAFTS", "INT32", (-1,)),
)
"""New tokens of each row ``[R, K + 1]``, -1 behind the last, and how many of them were drafts."""

CONTROL = TensorSpec("CONTROL", "STRING", (1,), optional=True)
"""Instead of a step: what is to be done with a slot, as JSON."""

EXTRA = TensorSpec("EXTRA", "STRING", (-1,), optional=True)
"""Arrays that go with it, by turns a name and an array in NumPy's file format."""

NOTHING, UNUSABLE = -1, -2


def _optional(specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """The same, of a model that also takes requests without them."""
    return tuple(TensorSpec(s.name, s.type, s.dims, optional=True) for s in specs)


REPLY = TensorSpec("REPLY", "STRING", (1,))
"""The answer to a control request, as JSON."""


def step_models(drafter: str | None) -> list[ModelSpec]:
    """The models of a step, in order.

    Args:
        drafter: Name of the speculator; ``None``: nothing is drafted.
    """
    verify = ModelSpec("verify", (*_STEP, *_DRAFTED), (TARGET,))
    accept = ModelSpec("accept", (*_DRAFTED, TARGET), _CHOSEN)
    if drafter is None:
        return [verify, accept]
    return [ModelSpec(f"draft_{drafter}", (SLOT, *_DRAFTING), _DRAFTED), verify, accept]


def ensemble(drafter: str | None) -> EnsembleSpec:
    """The step as one model: ``spec_step_NAME``, or ``plain_step``."""
    name = "plain_step" if drafter is None else f"spec_step_{drafter}"
    outputs = [s.name for s in (*_CHOSEN, *(_DRAFTED if drafter else ()))]
    return EnsembleSpec(name, tuple(step_models(drafter)), tuple(outputs))


def with_control(model: ModelSpec) -> ModelSpec:
    """A model as it is served: it takes control requests too."""
    return ModelSpec(model.name, (*_optional(model.inputs), CONTROL, EXTRA), (*model.outputs, REPLY, EXTRA))
