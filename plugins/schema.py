# SPDX-License-Identifier: Apache-2.0
"""The schema table of a custom op: one description that everything else is generated from.

An op of the ``nemo`` domain is described once, as an :class:`Op`, in its folder's ``schema.py``. The ONNX
schema that type-checks a model, the signature of the reference function and the documentation page all come
from that table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx.defs

DOMAIN = "nemo"
"""The ONNX domain of the custom ops."""

OPSET_VERSION = 1
"""The version of the ``nemo`` opset; bumped whenever the meaning of an op changes."""

FLOATS = ("tensor(float)", "tensor(float16)", "tensor(bfloat16)")
INDEX = ("tensor(int64)",)
SCALES = ("tensor(float8e4m3fn)", "tensor(float)")
STORED = (*FLOATS, "tensor(float8e4m3fn)", "tensor(uint8)")
"""Types in which a projection's weight may be stored; see :mod:`nemo_build.plugins.formats`."""


@dataclass(frozen=True)
class Param:
    """An input or an output of an op.

    Attributes:
        name: The name used in the reference function and in the documentation.
        type: A type variable of the op (a key of :attr:`Op.types`).
        shape: The shape in words, for example ``[B, L, C]``.
        doc: What it holds, with its unit where it has one.
        optional: Whether the input may be left out.
        variadic: Whether the last input stands for any number of tensors (of any mixture of its types).
    """

    name: str
    type: str
    shape: str
    doc: str
    optional: bool = False
    variadic: bool = False


@dataclass(frozen=True)
class Attribute:
    """An attribute of an op; without a ``default`` it is required."""

    name: str
    doc: str
    default: int | float | str | None = None
    kind: type[int] | type[float] | type[str] = float


@dataclass(frozen=True)
class Op:
    """The schema of one custom op.

    Attributes:
        name: The op type.
        doc: What it computes, with the source of the formula.
        types: Type variables and the ONNX types that each admits.
        inputs: Inputs in order.
        outputs: Outputs in order.
        attributes: Attributes.
        aliases: Output name -> name of the input whose buffer a backend may update in place. A reference
            body reads such an input through exactly one gather, and everything it writes depends on what
            was gathered, so that binding both to one buffer is safe without a runtime knowing of it.
    """

    name: str
    doc: str
    types: dict[str, tuple[str, ...]]
    inputs: tuple[Param, ...]
    outputs: tuple[Param, ...]
    attributes: tuple[Attribute, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)

    def onnx_schema(self) -> onnx.defs.OpSchema:
        """The op as an ``onnx.defs.OpSchema``, ready to be registered."""
        from onnx.defs import OpSchema

        option = OpSchema.FormalParameterOption

        def formal(p: Param) -> OpSchema.FormalParameter:
            kind = option.Variadic if p.variadic else option.Optional if p.optional else option.Single
            return OpSchema.FormalParameter(
                p.name, p.type, f"{p.shape}: {p.doc}", param_option=kind, is_homogeneous=not p.variadic
            )

        kinds = OpSchema.AttrType
        attr_kind = {int: kinds.INT, float: kinds.FLOAT, str: kinds.STRING}
        attributes = []
        for a in self.attributes:
            if a.default is None:
                attributes.append(OpSchema.Attribute(a.name, attr_kind[a.kind], a.doc, required=True))
            else:
                from onnx.helper import make_attribute

                default = make_attribute(a.name, a.kind(a.default))
                attributes.append(OpSchema.Attribute(a.name, default, a.doc))
        return OpSchema(
            self.name,
            DOMAIN,
            OPSET_VERSION,
            self.doc,
            inputs=[formal(p) for p in self.inputs],
            outputs=[formal(p) for p in self.outputs],
            type_constraints=[(name, list(types), "") for name, types in self.types.items()],
            attributes=attributes,
        )


SLOTS = Param("slots", "I", "[B]", "state slot of each row; rows with new tokens must name distinct slots")
PAST = Param("past", "I", "[B]", "tokens before the new ones: committed, plus those `accepted` commits now")
ACCEPTED = Param("accepted", "I", "[B]", "how many of the slot's pending tokens this step commits first")
LENGTHS = Param("lengths", "I", "[B]", "valid new tokens of each row; 0 makes it a padding row")

WEIGHT_FORMAT = Attribute("weight_format", "how the weights are stored", "plain", kind=str)
ACTIVATION_FORMAT = Attribute("activation_format", "what the input is rounded to", "none", kind=str)
