# SPDX-License-Identifier: Apache-2.0
"""The registry of custom ops: every folder of this package that has a ``schema`` module is an op.

Adding an op is adding a folder with two modules: ``schema.py`` (``OP``, the table) and ``reference.py``
(``function``, the body in standard ops as ONNX text, and ``reference``, the same in plain NumPy).
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from nemo_build import plugins
from nemo_build.plugins.schema import DOMAIN, OPSET_VERSION, Op

if TYPE_CHECKING:
    import onnx

STANDARD_OPSET = 23
"""The version of the standard ONNX opset that graphs and reference functions import."""


@dataclass(frozen=True)
class Plugin:
    """An op with its references.

    Attributes:
        op: The schema table.
        body: ``body(attributes, present) -> str``: the reference function's body as ONNX text. It may depend
            on the node's attributes and on which optional inputs are present.
        reference: The plain NumPy version; same inputs and attributes, same outputs.
    """

    op: Op
    body: Callable[[Mapping[str, Any], Collection[str]], str]
    reference: Callable[..., Any]

    def input_names(self, count: int) -> list[str]:
        """Names for ``count`` inputs; a variadic last input is numbered (``weights_0``, ``weights_1``, ...)."""
        names = [p.name for p in self.op.inputs if not p.variadic][:count]
        if self.op.inputs[-1].variadic:
            base = self.op.inputs[-1].name
            names += [f"{base}_{i}" for i in range(count - len(names))]
        return names

    def function(
        self, attributes: Mapping[str, Any], present: Collection[str], *, inputs: int, overload: str = ""
    ) -> onnx.FunctionProto:
        """The reference body as a model-local function.

        Args:
            attributes: Attributes of the node that calls it.
            present: Names of the inputs the node passes.
            inputs: How many inputs the node has, absent ones in between included.
            overload: Tells apart several bodies of one op in one model.
        """
        import onnx.helper
        import onnx.parser

        declared = ", ".join(a.name for a in self.op.attributes if a.default is None)
        # Every fixed input is declared, so that nodes with and without trailing optional inputs share a function.
        fixed = sum(not p.variadic for p in self.op.inputs)
        names = ", ".join(self.input_names(max(inputs, fixed)))
        outputs = ", ".join(p.name for p in self.op.outputs)
        head = f'<domain: "{DOMAIN}", opset_import: ["" : {STANDARD_OPSET}], overload: "{overload}">'
        signature = f"{self.op.name} {f'<{declared}> ' if declared else ''}({names}) => ({outputs})"
        proto = onnx.parser.parse_function(f"{head}\n{signature}\n{{\n{self.body(attributes, present)}\n}}")
        proto.attribute_proto.extend(
            onnx.helper.make_attribute(a.name, a.kind(a.default))
            for a in self.op.attributes
            if a.default is not None
        )
        proto.doc_string = self.op.doc
        return proto


@cache
def plugins_by_name() -> Mapping[str, Plugin]:
    """All ops, by op type."""
    found = {}
    for info in pkgutil.iter_modules(plugins.__path__, plugins.__name__ + "."):
        if info.ispkg and importlib.util.find_spec(f"{info.name}.schema"):
            op: Op = importlib.import_module(f"{info.name}.schema").OP
            reference = importlib.import_module(f"{info.name}.reference")
            found[op.name] = Plugin(op, reference.function, reference.reference)
    return found


@cache
def register_schemas() -> None:
    """Make the ops known to ``onnx.checker`` and to shape inference in this process (idempotent)."""
    import onnx.defs

    for plugin in plugins_by_name().values():
        if not onnx.defs.has(plugin.op.name, domain=DOMAIN, max_inclusive_version=OPSET_VERSION):
            onnx.defs.register_schema(plugin.op.onnx_schema())
