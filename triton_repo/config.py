# SPDX-License-Identifier: Apache-2.0
"""``config.pbtxt`` of models, from the tables of their tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nemo_build.triton_repo.tensors import EnsembleSpec, TensorSpec

Message = Mapping[str, Any]
"""A protobuf message: fields by name; a list is a repeated field, an :class:`Enum` a name."""


class Enum(str):
    """A name of an enumeration, which is written without quotes."""


def stage_config(name: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> str:
    """The configuration of a model of a step.

    One instance: all of them would need the state. No batcher: the scheduler makes the batches, so that a request is
    a step of all sequences.
    """
    return _text(_python(name, inputs, outputs))


def front_config(name: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> str:
    """The configuration of the model that clients talk to: any number of responses to a request, of one prompt."""
    message = _python(name, inputs, outputs)
    return _text(message | {"max_batch_size": 1, "model_transaction_policy": {"decoupled": True}})


def ensemble_config(spec: EnsembleSpec, name: str, models: Mapping[str, str]) -> str:
    """The configuration of a step.

    Args:
        spec: Its models.
        name: What it is called in the repository.
        models: What they are called there.
    """
    given = {t.name: t for m in spec.models for t in (*m.inputs, *m.outputs)}
    return _text(
        {
            "name": name,
            "platform": "ensemble",
            "max_batch_size": 0,
            "input": [_tensor(t) for t in spec.inputs()],
            "output": [_tensor(given[o]) for o in (*spec.outputs, *spec.optional)],
            "ensemble_scheduling": {
                "step": [
                    {
                        "model_name": models[m.name],
                        "model_version": -1,
                        "input_map": [{"key": t.name, "value": t.name} for t in m.inputs],
                        "output_map": [{"key": t.name, "value": t.name} for t in m.outputs],
                    }
                    for m in spec.models
                ]
            },
        }
    )


def _python(name: str, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> dict[str, Any]:
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        "input": [_tensor(t) for t in inputs],
        "output": [_tensor(replace(t, optional=False)) for t in outputs],
        "instance_group": [{"kind": Enum("KIND_CPU"), "count": 1}],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    found = {"name": spec.name, "data_type": _type(spec.type), "dims": list(spec.dims)}
    return found | ({"optional": True} if spec.optional else {})


def _type(name: str) -> Enum:
    return Enum(f"TYPE_{name}")


def _text(message: Message, indent: str = "") -> str:
    """Protobuf's text format."""
    return "".join(_field(name, value, indent) for name, value in message.items())


def _field(name: str, value: Any, indent: str) -> str:
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return "".join(_field(name, item, indent) for item in value)
    if isinstance(value, Mapping):
        return f"{indent}{name} {{\n{_text(value, indent + '  ')}{indent}}}\n"
    if isinstance(value, list):
        return f"{indent}{name}: [{', '.join(map(_scalar, value))}]\n"
    return f"{indent}{name}: {_scalar(value)}\n"


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (Enum, int)) else json.dumps(value)
