# SPDX-License-Identifier: Apache-2.0
"""The machines an engine can be made for.

Memory and bandwidth are the vendor's data-sheet figures for one device (decimal GB, GB/s); where a product
exists in several sizes the table holds the largest and the note says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """A device.

    Attributes:
        name: What ``--target`` takes.
        product: The product's name.
        sm: CUDA compute capability times ten (``90`` for 9.0); ``None`` for a CPU.
        memory_gb: Device memory in units of 10^9 bytes; ``None`` where it depends on the machine.
        bandwidth_gbs: Memory bandwidth in 10^9 bytes per second; ``None`` where it depends on the machine.
        note: What else a reader should know.
    """

    name: str
    product: str
    sm: int | None
    memory_gb: float | None
    bandwidth_gbs: float | None
    note: str = ""

    @property
    def fp8(self) -> bool:
        """Whether the tensor cores multiply FP8."""
        return self.sm is not None and self.sm >= 89

    @property
    def fp4(self) -> bool:
        """Whether the tensor cores multiply FP4."""
        return self.sm is not None and self.sm >= 100


_ALL = (
    Target("cpu", "any CPU", None, None, None, "memory and bandwidth are the machine's"),
    Target("a100", "A100", 80, 80, 2039, "SXM, 80 GB; also sold with 40 GB"),
    Target("l40s", "L40S", 89, 48, 864),
    Target("h100", "H100", 90, 80, 3350, "SXM"),
    Target("h200", "H200", 90, 141, 4800),
    Target("b200", "B200", 100, 180, 8000),
    Target("gb200", "GB200", 100, 186, 8000, "one of the two GPUs of a superchip"),
    Target("b300", "B300", 103, 270, 8000),
    Target("gb300", "GB300", 103, 279, 8000, "one of the two GPUs of a superchip"),
    Target("dgx-station", "DGX Station (GB300)", 103, 252, 7100),
    Target("jetson-thor", "Jetson AGX Thor", 110, 128, 273, "memory shared with the CPU"),
    Target("jetson-orin", "Jetson AGX Orin", 87, 64, 204.8, "memory shared with the CPU"),
    Target("rtx-pro-6000", "RTX PRO 6000 Blackwell", 120, 96, 1792),
    Target("rtx-50", "GeForce RTX 5090", 120, 32, 1792, "the largest of the 50 series"),
    Target("dgx-spark", "DGX Spark (GB10)", 121, 128, 273, "memory shared with the CPU"),
    Target("rtx-40", "GeForce RTX 4090", 89, 24, 1008, "the largest of the 40 series"),
    Target("rtx-30", "GeForce RTX 3090 Ti", 86, 24, 1008, "the largest of the 30 series"),
)

TARGETS: Mapping[str, Target] = {t.name: t for t in _ALL}
"""All targets by name."""
