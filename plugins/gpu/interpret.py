# SPDX-License-Identifier: Apache-2.0
"""Run kernels on NumPy arrays with Triton's interpreter: slow, exact in its order of operations, without a GPU.

The interpreter executes one program after the other, so it does not show races between programs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import ml_dtypes  # noqa: F401  (makes its types known to NumPy by name)
import numpy as np
from numpy.typing import NDArray

from nemo_build.plugins.gpu.kernel import POINTERS, Kernel, bind, resolve
from nemo_build.plugins.gpu.worker import Worker

Array = NDArray[Any]


@cache
def _worker() -> Worker:
    return Worker({"TRITON_INTERPRET": "1"})


def run(kernel: Kernel, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of one launch.

    Args:
        kernel: The kernel.
        inputs: Its inputs by name, of the types and shapes that it declares; none of them is written to.

    Returns:
        The outputs by name. One that shares an input's buffer is the changed copy of that input. Elements of the
        others that the kernel leaves alone are NaN (or the largest integer), so that nothing can rely on them.

    Raises:
        ValueError: An input is missing, or has another type or shape than declared.
    """
    for tensor in kernel.inputs:
        if tensor.name not in inputs or inputs[tensor.name].dtype.name != tensor.dtype:
            raise ValueError(f"{kernel.label}: `{tensor.name}` must be an array of {tensor.dtype}.")
    sizes = bind(kernel.inputs, {t.name: inputs[t.name].shape for t in kernel.inputs})
    arrays = {t.name: np.array(inputs[t.name], order="C") for t in kernel.inputs}
    for tensor in kernel.outputs:
        if tensor.alias is None:
            shape = tuple(resolve(d, sizes) for d in tensor.shape)
            dtype = np.dtype(tensor.dtype)
            arrays[tensor.name] = np.full(shape, np.iinfo(dtype).max if dtype.kind in "iu" else np.nan, dtype)
    function = f"{kernel.function.__module__}:{kernel.function.__name__}"
    aliases = {t.name: t.alias for t in kernel.outputs if t.alias is not None}
    scalars = {**kernel.constexprs, **{name: sizes[name] for name in kernel.sizes}}
    done = _worker().call(f"{__name__}:_run_here", function, kernel.grid(sizes), arrays, aliases, scalars)
    return {t.name: done[t.alias or t.name] for t in kernel.outputs}


def _run_here(
    function: str,
    grid: tuple[int, int, int],
    arrays: dict[str, Array],
    aliases: dict[str, str],
    scalars: dict[str, Any],
) -> dict[str, Array]:
    """What the worker does: launch a function on arrays, in place."""
    _mend_interpreter()
    _patched.clear()
    module, _, name = function.partition(":")
    buffers = {key: _Buffer(array) for key, array in arrays.items()}
    buffers |= {output: buffers[source] for output, source in aliases.items()}
    getattr(importlib.import_module(module), name)[grid](**buffers, **scalars)
    return arrays


_patched: set[int] = set()
"""Modules, by the identity of their globals, whose view of Triton's language was replaced in this launch."""


@cache
def _mend_interpreter() -> None:
    """Give it a dot product of any type, in one order, and let it prepare for a module's functions once a launch.

    The interpreter of Triton 3.9 takes the bits of bfloat16 for integers, and leaves the order to NumPy, in whose sums
    it depends on where in a matrix a row is. Whenever a kernel calls a function it looks through the whole language for
    what it has to replace, though it has done so before; that is a good part of all its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.interpreter import interpreter_builder as builder

    multiply = builder.create_dot

    def create_dot(a: Any, b: Any, sums: Any, *rest: Any) -> Any:
        left, right = (
            builder.create_fp_ext(v, tl.float32) if v.dtype.scalar == tl.bfloat16 else v for v in (a, b)
        )
        for k in range(left.data.shape[-1]):
            column, row = left.data[:, k : k + 1], right.data[k : k + 1]
            parts = TensorHandle(column, left.dtype.scalar), TensorHandle(row, right.dtype.scalar)
            sums = multiply(*parts, sums, *rest)
        return sums

    builder.create_dot = create_dot
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in _patched:
            return interpreter._LangPatchScope()
        _patched.add(module)
        return patch(function)

    interpreter._patch_lang = patch_once


class _Buffer:
    """A NumPy array with the few methods that the interpreter calls on tensors; it copies nothing."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self.dtype = POINTERS[array.dtype.name].removeprefix("*")

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def untyped_storage(self) -> _Buffer:
        return self

    cpu = untyped_storage

    def new_empty(self, *_: Any, **__: Any) -> _Buffer:
        return _Buffer(self.array)

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset

    def set_(self, *_: Any) -> None:
        pass

    copy_ = set_
