# SPDX-License-Identifier: Apache-2.0
"""What is known of a GPU kernel before it is compiled: one launch of one Triton function.

A kernel is a node of its own: its parameters are the inputs, then sizes as 32-bit integers, then the outputs, which is
the order in which runtimes that launch precompiled kernels pass them. All else (widths, numbers of heads, clamps, block
sizes) is part of the code, so floating-point attributes never become parameters. There is no scratch memory: what one
kernel leaves to another is an output.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int32": "*i32",
    "int64": "*i64",
}
"""Element types as NumPy and ml_dtypes name them, and Triton's pointers to them."""

ALIGNMENT = 16
"""Every tensor's address is a multiple of so many bytes, which lets a thread move 16 bytes at once."""


@dataclass(frozen=True)
class Ceil:
    """A dimension that is a quotient rounded up, for example the number of chunks of some tokens."""

    size: str
    by: int


Dim = int | str | Ceil
"""A dimension: a number, the name of a size, or a quotient of one."""


@dataclass(frozen=True)
class Tensor:
    """A tensor that a kernel reads or writes, contiguous and in row-major order.

    Attributes:
        name: Name of the function's parameter.
        dtype: Element type, a key of :data:`POINTERS`.
        shape: Dimensions; names in it are bound when the kernel is launched.
        alias: Of an output: the input whose buffer it must share. The kernel leaves elements alone that do not
            change.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    alias: str | None = None


@dataclass(frozen=True)
class Kernel:
    """One launch of one Triton function, for given attributes, widths and types.

    Attributes:
        op: The op type that it is of.
        name: Which of the op's kernels it is.
        stage: Which of the op's launches it is a variant of; empty where the op is one launch. Variants have the same
            tensors, and each is right for whatever sizes they have.
        types: Type variables and what they stand for in this variant, for example ``{"T": "bfloat16"}``.
        function: The function, decorated with ``triton.jit``.
        inputs: What it reads, in the order of its parameters.
        sizes: Names of its 32-bit integers; each is a dimension of an input, or a quotient of one.
        outputs: What it writes, in the order of its parameters.
        constexprs: Values of the other parameters, which are compiled in.
        grid: Number of programs along x, y and z for given sizes. It uses nothing but ``+ - * //`` on them, so that
            symbolic sizes pass through it as well.
        num_warps: Warps of a program.
        num_stages: How many iterations of a loop with dot products are in flight.
        per_token: Whether it may run for every decoded token; such a kernel keeps everything in registers.
        least_sm: The first architecture (compute capability times ten) that has the instructions it is made of.
        least_ptx: The first version of PTX (times ten) that has them.
    """

    op: str
    name: str
    types: Mapping[str, str]
    function: Any
    inputs: tuple[Tensor, ...]
    sizes: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    constexprs: Mapping[str, Any]
    grid: Callable[[Mapping[str, Any]], tuple[Any, Any, Any]]
    num_warps: int = 4
    num_stages: int = 2
    stage: str = field(default="", kw_only=True)
    per_token: bool = field(default=False, kw_only=True)
    least_sm: int = field(default=80, kw_only=True)
    least_ptx: int = field(default=80, kw_only=True)

    @property
    def label(self) -> str:
        """A name that tells it from the op's other kernels and variants."""
        return f"{self.op}.{self.name}[{','.join(self.types.values())}]"

    @property
    def signature(self) -> dict[str, str]:
        """Parameter names and Triton types, in order; compiled-in ones are ``constexpr``.

        Raises:
            ValueError: The function's parameters are not inputs, sizes and outputs in this order, or one of them is
                neither passed nor compiled in.
        """
        passed = {t.name: POINTERS[t.dtype] for t in self.inputs} | dict.fromkeys(self.sizes, "i32")
        passed |= {t.name: POINTERS[t.dtype] for t in self.outputs}
        names = list(self.function.arg_names)
        if [n for n in names if n not in self.constexprs] != list(passed):
            raise ValueError(f"{self.label}: parameters {names} do not fit {[*passed, *self.constexprs]}.")
        return {n: passed.get(n, "constexpr") for n in names}


def bind(tensors: tuple[Tensor, ...], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The sizes that the shapes of tensors give.

    Raises:
        ValueError: A shape does not fit, or two dimensions disagree about a size.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors:
        shape = shapes[tensor.name]
        if len(shape) != len(tensor.shape):
            raise ValueError(f"`{tensor.name}` has the shape {shape} for {tensor.shape}.")
        for dim, actual in zip(tensor.shape, shape, strict=True):
            expected = sizes.setdefault(dim, actual) if isinstance(dim, str) else resolve(dim, sizes)
            if actual != expected:
                raise ValueError(f"`{tensor.name}` has the shape {shape} for {tensor.shape} with {sizes}.")
    return sizes


def resolve(dim: Dim, sizes: Mapping[str, int]) -> int:
    """A dimension as a number."""
    if isinstance(dim, int):
        return dim
    return sizes[dim] if isinstance(dim, str) else ceil_div(sizes[dim.size], dim.by)


def ceil_div(size: Any, by: int) -> Any:
    """The quotient rounded up; works on symbolic sizes too."""
    return (size + (by - 1)) // by


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``n`` and ``least``: how long a block must be to cover ``n``."""
    return 1 << (max(n, least) - 1).bit_length()
