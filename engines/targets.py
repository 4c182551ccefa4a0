# SPDX-License-Identifier: Apache-2.0
"""The machines an engine can be made for, and what follows from what they can do.

:data:`TARGETS` is the table: facts about products, each row with the source of its figures. Everything else is
derived from it by the rules below the table, and nowhere else: which formats a target multiplies, how it drafts, how
much of its memory a plan may take, and which backends exist for it.

Memory and bandwidth are the vendor's figures for one device in decimal units, GB = 10^9 bytes and GB/s; compute
capabilities are from "CUDA GPU Compute Capability" (NVIDIA developer pages). Where a product exists in several sizes
the table holds the largest and the note says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_build.errors import UserError


@dataclass(frozen=True)
class Target:
    """A device.

    Attributes:
        name: What ``--target`` takes.
        product: The product's name.
        sm: CUDA compute capability times ten (``90`` for 9.0); ``None`` for a CPU.
        memory_gb: Device memory in units of 10^9 bytes; ``None`` where it depends on the machine.
        bandwidth_gbs: Memory bandwidth in 10^9 bytes per second; ``None`` where it depends on the machine.
        source: Where memory and bandwidth are from.
        note: What else a reader should know.
        shared_memory: Whether the memory is the CPU's too.
    """

    name: str
    product: str
    sm: int | None
    memory_gb: float | None
    bandwidth_gbs: float | None
    source: str
    note: str = ""
    shared_memory: bool = False

    @property
    def fp8(self) -> bool:
        """Whether the tensor cores multiply FP8."""
        return self.sm is not None and self.sm >= 89

    @property
    def fp4(self) -> bool:
        """Whether the tensor cores multiply FP4."""
        return self.sm is not None and self.sm >= 100

    def to_json(self) -> dict[str, Any]:
        """The row and all that follows from it, as plain data."""
        return {
            "name": self.name,
            "product": self.product,
            "sm": self.sm,
            "memory_gb": self.memory_gb,
            "bandwidth_gbs": self.bandwidth_gbs,
            "shared_memory": self.shared_memory,
            "fp8": self.fp8,
            "fp4": self.fp4,
            "backends": {b.name: b.refusal or "builds" for b in backends_of(self)},
            "weights": list(weight_formats(self)),
            "default_weights": default_weights(self),
            "activations": list(activation_formats(self)),
            "speculators": [[s.name, s.drafts] for s in speculators(self)],
            "headroom": headroom(self),
            "source": self.source,
            "note": self.note,
        }


_ALL = (
    Target("cpu", "any CPU", None, None, None, "the machine", "memory and bandwidth are the machine's", True),
    Target("a100", "A100", 80, 80, 2039, "NVIDIA A100 data sheet", "SXM, 80 GB; also sold with 40 GB"),
    Target("l40s", "L40S", 89, 48, 864, "NVIDIA L40S data sheet"),
    Target("h100", "H100", 90, 80, 3350, "NVIDIA H100 data sheet", "SXM"),
    Target("h200", "H200", 90, 141, 4800, "NVIDIA H200 data sheet"),
    Target("b200", "B200", 100, 180, 8000, "NVIDIA HGX B200 data sheet"),
    Target(
        "gb200",
        "GB200",
        100,
        186,
        8000,
        "NVIDIA GB200 NVL72 data sheet",
        "one of the two GPUs of a superchip",
    ),
    Target("b300", "B300", 103, 270, 8000, "NVIDIA HGX B300 data sheet"),
    Target(
        "gb300",
        "GB300",
        103,
        279,
        8000,
        "NVIDIA GB300 NVL72 data sheet",
        "one of the two GPUs of a superchip",
    ),
    Target("dgx-station", "DGX Station (GB300)", 103, 252, 7100, "NVIDIA DGX Station data sheet"),
    Target(
        "jetson-thor",
        "Jetson AGX Thor",
        110,
        128,
        273,
        "NVIDIA Jetson Thor data sheet",
        "memory shared with the CPU",
        True,
    ),
    Target(
        "jetson-orin",
        "Jetson AGX Orin",
        87,
        64,
        204.8,
        "NVIDIA Jetson AGX Orin data sheet",
        "memory shared with the CPU; also with 32 GB",
        True,
    ),
    Target(
        "rtx-pro-6000",
        "RTX PRO 6000 Blackwell",
        120,
        96,
        1792,
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition data sheet",
    ),
    Target(
        "rtx-50",
        "GeForce RTX 5090",
        120,
        32,
        1792,
        "NVIDIA GeForce RTX 5090 specifications",
        "the largest of the 50 series",
    ),
    Target(
        "dgx-spark",
        "DGX Spark (GB10)",
        121,
        128,
        273,
        "NVIDIA DGX Spark data sheet",
        "memory shared with the CPU",
        True,
    ),
    Target(
        "rtx-40",
        "GeForce RTX 4090",
        89,
        24,
        1008,
        "NVIDIA GeForce RTX 4090 specifications",
        "the largest of the 40 series",
    ),
    Target(
        "rtx-30",
        "GeForce RTX 3090 Ti",
        86,
        24,
        1008,
        "NVIDIA GeForce RTX 3090 Ti specifications",
        "the largest of the 30 series",
    ),
)

TARGETS: Mapping[str, Target] = {t.name: t for t in _ALL}
"""All targets by name."""


# Rules: backends.


@dataclass(frozen=True)
class BackendRule:
    """A backend, and the targets it exists for.

    Attributes:
        name: Its name in engines' manifests.
        sms: Compute capabilities times ten that it makes engines for; ``None``: every GPU; empty: CPUs.
        refusal: Why this version makes no engine with it; empty where it does.
        build_bytes: Memory that a build takes.
        build_share: Further memory of a build, for each byte of the engine's weights.
        apart: Whether graphs share no weights, as those that are compiled do.
        weight_copies: How often an engine has the weights in memory, with graphs for all its phases.
        state_copies: How often it has recurrent states.
    """

    name: str
    sms: frozenset[int] | None
    refusal: str
    build_bytes: int
    build_share: float
    apart: bool = False
    weight_copies: int = 1
    state_copies: int = 1

    def serves(self, target: Target) -> bool:
        """Whether it makes engines for a target, in this version or in one to come."""
        if target.sm is None:
            return self.sms == frozenset()
        return self.sms is None or target.sm in self.sms


RTX_SMS = frozenset({80, 86, 89, 120, 121})
"""What TensorRT-RTX 1.7 compiles for, besides SM 75 (its ``ComputeCapability`` enumeration)."""

BACKEND_RULES: tuple[BackendRule, ...] = (
    # Packing streams: a piece of a tensor is in memory at a time, besides the graphs and the interpreter.
    BackendRule("onnxruntime", frozenset(), "", 1 << 30, 0.0),
    # Its builder holds all weights of a plan while it writes them out. Plans share nothing, and there is one for
    # decoding and one for prompts; states are written to other buffers than they are read from.
    BackendRule("tensorrt-rtx", RTX_SMS, "", 2 << 30, 1.2, True, 2, 2),
    # Its plans hold code alone; weights are in a file that plans share, and are not read to build them.
    BackendRule("tensorrt", None, "", 4 << 30, 0.0),
    # Kernels are compiled one at a time, by a process of Triton's; weights are written piece by piece.
    BackendRule("onnxruntime-cuda", None, "", 2 << 30, 0.0),
)
"""All backends, the preferred ones first."""


def backends_of(target: Target) -> tuple[BackendRule, ...]:
    """The backends that exist for a target, the preferred one first."""
    return tuple(rule for rule in BACKEND_RULES if rule.serves(target))


def builder_of(target: Target) -> BackendRule | None:
    """The backend that this version builds a target's engines with; ``None`` if it builds none."""
    return next((rule for rule in backends_of(target) if not rule.refusal), None)


def find_target(name: str) -> Target:
    """The target of this name. Raises UserError, with all names, if there is none."""
    if name not in TARGETS:
        raise UserError(f"There is no target {name!r}.", [f"{t.name}: {t.product}" for t in TARGETS.values()])
    return TARGETS[name]


def require_backend(name: str, backend: str | None = None) -> BackendRule:
    """The backend that builds engines for the target of this name.

    Args:
        name: The target.
        backend: One of its backends by name; ``None``: the first that builds.

    Raises:
        UserError: There is no such target, it has no such backend, or this version builds nothing for it; says why for
            each backend.
    """
    target = find_target(name)
    rules = {rule.name: rule for rule in backends_of(target)}
    if backend is not None and backend not in rules:
        raise UserError(f"There is no backend {backend!r} for {name} ({target.product}).", list(rules))
    builder = builder_of(target) if backend is None or rules[backend].refusal else rules[backend]
    if builder is not None:
        return builder
    buildable = [t.name for t in TARGETS.values() if builder_of(t)]
    raise UserError(
        f"This version builds no engine for {name} ({target.product}).",
        [f"{rule.name}: {rule.refusal}" for rule in backends_of(target)],
        f"It builds for {', '.join(buildable)}; --plan does the arithmetic for every target.",
    )


# Rules: precision.


def weight_formats(target: Target) -> tuple[str, ...]:
    """Formats in which a target holds projections without decoding them to 16 bits in memory, smallest first.

    CPU kernels decode every format in registers. On a GPU a format is one that its tensor cores multiply, or INT4 and
    INT8, whose decoding compilers fuse into a 16-bit multiplication on every SM from 80; FP4 and FP8 are not fused
    below the SM that multiplies them. Engines with kernels of ours have these as stored all the same.
    """
    if target.sm is None:
        return ("nvfp4", "int4", "int8", "fp8", "bf16")
    fp4, fp8 = ("nvfp4",) if target.fp4 else (), ("fp8",) if target.fp8 else ()
    return (*fp4, "int4", *fp8, "int8", "bf16")


def default_weights(target: Target) -> str:
    """The format that unquantized projections are to be quantized to for a target, where memory or speed ask for it.

    The smallest one it multiplies natively: NVFP4 with FP4 tensor cores, INT4 without. A quantized checkpoint keeps
    its own formats.
    """
    return weight_formats(target)[0]


_NEAREST = {"nvfp4": "int4", "fp8": "bf16"}


def held_format(target: Target, stored: str) -> str:
    """In what format an engine holds weights that are stored in a format.

    As they are stored, but that a compiler's engine for a GPU without FP4 or FP8 has the nearest format that the GPU
    has. Kernels of ours decode every format.
    """
    builder = builder_of(target)
    if builder is None or not builder.apart or stored in weight_formats(target):
        return stored
    return _NEAREST.get(stored, stored)


def activation_formats(target: Target) -> tuple[str, ...]:
    """What projections may round their inputs to, the default first.

    bfloat16 wherever it is multiplied: it has float32's range, which activations of these models need. FP8 and NVFP4
    only where tensor cores multiply them, and only for weights whose checkpoint has an ``input_scale`` for it.
    """
    if target.sm is None:
        return ("bfloat16", "float32", "int8")
    return ("bfloat16", *(("fp8",) if target.fp8 else ()), *(("nvfp4",) if target.fp4 else ()))


def state_types(target: Target) -> tuple[str, str]:
    """In what a target keeps recurrent states and key/value caches, where a plan is not told otherwise.

    States are float32 everywhere, because their errors stay for the rest of a sequence; narrower ones are a choice
    to be made knowingly. Caches are float32 in the CPU's kernels and bfloat16 elsewhere.
    """
    return "float32", "float32" if target.sm is None else "bfloat16"


# Rules: speculation.

LAUNCH_BOUND_GBS = 2000
"""GB/s from which a step of one sequence is bound by launching its kernels, not by reading its weights.

The published NVFP4 checkpoint reads 2.4 GB a token: 1.2 ms at this bandwidth, about what some 500 launches take.
"""

DRAFTER_MEMORY_GB = 32
"""GB from which a block drafter fits: beside 21.6 GB of NVFP4 weights its 1.4 GB leave 24 GB nothing for sequences."""


@dataclass(frozen=True)
class Speculation:
    """A speculator and its draft length; ``None``: as the runtime finds that it pays."""

    name: str
    drafts: int | None


def speculators(target: Target) -> tuple[Speculation, ...]:
    """How a target drafts for few sequences at a time, best first; the first that an engine has the graphs for.

    On a CPU the runtime measures what steps cost. On a GPU it is arithmetic of bytes: a step that verifies K drafts
    reads the experts of K + 1 tokens. With acceptance lengths of 1.8 (K = 1) and 2.7 (K = 3), DSpark gains most at
    K = 3 (1.28 times), MTP at K = 1 (1.23 times; 1.14 at K = 3, since each draft reads the module and the head again).
    Where launches bound a step, width is free and MTP takes K = 3 as well. For many sequences at a time drafting is
    to be switched off.
    """
    if target.sm is None:
        return (Speculation("auto", None),)
    memory, bandwidth = target.memory_gb or 0, target.bandwidth_gbs or 0
    block = (Speculation("dspark", 3), Speculation("dflash", 3)) if memory >= DRAFTER_MEMORY_GB else ()
    return (*block, Speculation("mtp", 3 if bandwidth >= LAUNCH_BOUND_GBS else 1))


def default_speculation(target: Target, graphs: Collection[str]) -> Speculation | None:
    """The first of :func:`speculators` that an engine with these graphs can run; ``None`` for no speculation."""
    for speculation in speculators(target):
        if speculation.name in graphs or speculation.name == "auto":
            return speculation
    return None


# Rules: memory.


def headroom(target: Target) -> float:
    """Share of the memory that a plan leaves free.

    GPU memory of its own: 8 % for the driver's context, code and fragmentation. Memory shared with the CPU: 20 %, the
    operating system and the server run in it. On a CPU none: what is counted is the control group's limit, and mapped
    weights can be dropped.
    """
    if target.sm is None:
        return 0.0
    return 0.20 if target.shared_memory else 0.08


def usable_bytes(target: Target) -> int:
    """Bytes that a plan for a target may take. Raises ValueError for a target whose memory is the machine's."""
    if target.memory_gb is None:
        raise ValueError(f"the memory of {target.name} is the machine's")
    return int(target.memory_gb * 1e9 * (1 - headroom(target)))


def allowed_bytes(target: Target, memory: int | None) -> tuple[int, str]:
    """Bytes that the plan of an engine for a GPU may take, and of what; `memory` is what was asked for, if anything."""
    if memory is None:
        return usable_bytes(target), f"{target.name} ({target.memory_gb:g} GB)"
    return memory, "the memory allowed"


def build_memory(target: Target, weights: int) -> int:
    """Bytes of memory that a build for a target takes, with so many bytes of weights."""
    builder = builder_of(target)
    return builder.build_bytes + int(builder.build_share * weights) if builder else 0
