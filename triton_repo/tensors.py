# SPDX-License-Identifier: Apache-2.0
"""The tensors of the models of a step: one table, from which configurations and requests are made.

A step is one request for all sequences that take part in it. A row is a sequence; ``R`` rows, ``L`` new tokens of the
longest, ``K`` drafts of the one with most. Its steps are ``draft`` (takes in what was committed since, then drafts),
``verify`` (runs the target over new tokens and drafts, and chooses a token at each place that asks for one) and
``accept`` (how many drafts are what was chosen). Logits, hidden states and state never leave the process they are in.
Tensors are few, as each costs time in every process it goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
    """Models in a row; a tensor that one gives is what a later one takes by that name.

    Attributes:
        name: Its name.
        models: The models.
        outputs: What is wanted of every step.
        optional: What some steps are asked for as well.
    """

    name: str
    models: tuple[ModelSpec, ...]
    outputs: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def inputs(self) -> list[TensorSpec]:
        """What the ensemble is given: all that none of its models gives."""
        made = {o.name for m in self.models for o in m.outputs}
        found = {i.name: i for m in self.models for i in m.inputs if i.name not in made and not i.optional}
        return list(found.values())


def _table(name: str) -> TensorSpec:
    return TensorSpec(name, "INT32", (-1, -1))


ROWS, TOKENS = _STEP = (_table("ROWS"), _table("TOKENS"))
"""Of each row ``[R, 5]``: its state slot, tokens before the new ones, pending ones to commit, whether a token is wanted
after the last, and whether the drafter is told of it. Its new tokens, counted: the first number is how many."""

ASKED, KNOWN, PRICE = _DRAFTING = (_table("ASKED"), _table("KNOWN"), TensorSpec("PRICE", "FP32", (1,)))
"""Of each row ``[R, 3]``: its state slot, from which position on it has what the drafter has not heard of, and how many
drafts it may have. What was committed since the drafter heard of it and the token after that, counted. For all: what a
draft must bring to be worth its place (0: nothing)."""

DRAFT = _table("DRAFT")
"""Drafts of each row, counted."""

TARGET = _table("TARGET")
"""What the target chose in each row, counted; a row whose logits are unusable has a single -2, and one whose
grammar is too complex to go on with a single -3."""

LOGPROBS = TensorSpec("LOGPROBS", "FP64", (-1, -1))
"""Log probabilities of what the target chose, by row; see :func:`~nemo_build.triton_repo.arrays.to_logprobs`. There is
none if no row asks for them."""

CHOSEN = _table("CHOSEN")
"""How many drafts of each row are what was chosen there, and what was chosen, counted: ``[R, 2 + ...]``."""

CONTROL = TensorSpec("CONTROL", "STRING", (1,), optional=True)
"""Instead of a step: what is to be done with a slot, as JSON."""

EXTRA = TensorSpec("EXTRA", "STRING", (-1,), optional=True)
"""Arrays that go with it, by turns a name and an array in NumPy's file format."""

NOTHING, UNUSABLE, REFUSED = -1, -2, -3


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
    verify = ModelSpec("verify", (*_STEP, DRAFT), (TARGET, LOGPROBS))
    accept = ModelSpec("accept", (DRAFT, TARGET), (CHOSEN,))
    if drafter is None:
        return [verify, accept]
    return [ModelSpec(f"draft_{drafter}", _DRAFTING, (DRAFT,)), verify, accept]


def ensemble(drafter: str | None) -> EnsembleSpec:
    """The step as one model: ``spec_step_NAME``, or ``plain_step``."""
    name = "plain_step" if drafter is None else f"spec_step_{drafter}"
    outputs = (CHOSEN.name, DRAFT.name) if drafter else (CHOSEN.name,)
    return EnsembleSpec(name, tuple(step_models(drafter)), outputs, (LOGPROBS.name,))


def with_control(model: ModelSpec) -> ModelSpec:
    """A model as it is served: it takes control requests too."""
    return ModelSpec(model.name, (*_optional(model.inputs), CONTROL, EXTRA), (*model.outputs, REPLY, EXTRA))
