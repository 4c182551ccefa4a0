# SPDX-License-Identifier: Apache-2.0
"""Reads what a TensorRT-RTX plan says of itself, without a GPU and without the library.

A plan is a header of 64 bytes, the program as text (regions of memory, tensors, operations) with the CUDA source of
its kernels, and at the end the weights, which are not read. The fields of the header were found by comparing plans of
known content:

======  ====  ==========================================
offset  type
======  ====  ==========================================
0x00    4     ``vtrt``
0x08    u32   layout version, 2
0x10    u64   size of the file
0x18    4     version of the library, one byte a part
0x20    u32   GPUs, a bit each: SM 75, 80, 86, 89, 120, 121
0x38    u64   bytes of weights
======  ====  ==========================================
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_build.engines.tensorrt_rtx import LIBRARY
from nemo_build.errors import BundleError

HEADER_BYTES = 64
SMS = (75, 80, 86, 89, 120, 121)
"""GPUs by the bit that stands for them, compute capability times ten."""

_MAGIC = b"vtrt"
_LAYOUT = 2
_LARGEST_TEXT = 1 << 30  # of a model with 52 layers it has some 50 MB

_CONSTANT = re.compile(rb"tensor=\{[^}\n]*?const_payload_size=(\d{1,15}) [^\n]*? type=(\w{1,20}) ?\}")
_REGION = re.compile(rb"region = \{ name=devmem\S* size=(\d{1,15}) ")
_OPERATION = re.compile(
    rb"\n\s{1,4}(function|fully_connected|runtime_fusion)=\{ name=\"?([^\s\"]{1,300})([^\n]{0,100000})"
)
_TENSOR = re.compile(
    rb"tensor=\{[^\n]{0,400}? dims=\{([^}\n]{0,400})\} [^\n]{0,200}?"
    rb"name=\"([^\"\n]{1,300})\"[^\n]{0,400}? type=(\w{1,20}) ?\}"
)
_INPUTS = re.compile(rb" input(?:_args)?=\{([^}\n]{0,50000})\}")
_LAYER = re.compile(rb"\[ONNX Layer: ([^\]\n]{1,300})\]")
_NUMBERED = re.compile(
    r"/[a-z0-9]+_\d+$"
)  # what the lowering adds to the name of the node that it takes the place of
_PRODUCT = re.compile(r"/(matmul|reducesum)_\d+$")


@dataclass(frozen=True)
class PlanHeader:
    """What the header says: the library's version, the GPUs (compute capability times ten), sizes in bytes."""

    version: str
    sms: tuple[int, ...]
    nbytes: int
    weight_bytes: int


@dataclass(frozen=True)
class PlanSummary:
    """What a plan holds.

    Attributes:
        header: Its header.
        constants: Bytes of weights and other constants by type, as the compiler lays them out.
        scratch: Bytes of device memory besides weights, state and outputs.
        kernels: Launches of generated kernels in the program.
        products: Multiplications of matrices, whose kernel is chosen on the GPU.
        fusions: Multiplications with operations fused into them on the GPU, by what is fused.
        launches: Launches of generated kernels, by the operations in them, which their names abbreviate.
        precisions: For each layer that multiplies matrices, the types of what goes into that.
    """

    header: PlanHeader
    constants: Mapping[str, int]
    scratch: int
    kernels: int
    products: int
    fusions: Mapping[str, int]
    launches: Mapping[str, int]
    precisions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def read_header(path: Path) -> PlanHeader:
    """Read and check a plan's header.

    Raises:
        BundleError: The file is missing, no plan, of another layout or library, or not whole; says which.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            data = file.read(HEADER_BYTES)
    except OSError as error:
        raise _damaged(path, f"it cannot be read: {error.strerror}") from error
    if len(data) < HEADER_BYTES:
        raise _damaged(path, f"it has {size} bytes, fewer than a header's {HEADER_BYTES}")
    if data[:4] != _MAGIC:
        raise _damaged(path, f"it begins with {data[:4]!r}, not with {_MAGIC!r}")
    (layout,) = struct.unpack_from("<I", data, 0x08)
    if layout != _LAYOUT:
        raise _damaged(path, f"its layout is version {layout}, known is {_LAYOUT}")
    (nbytes,), version = struct.unpack_from("<Q", data, 0x10), ".".join(map(str, data[0x18:0x1C]))
    if version != LIBRARY.version:
        raise _damaged(
            path, f"it was made by TensorRT-RTX {version}; this version of nemo-build knows {LIBRARY.version}"
        )
    if nbytes != size:
        raise _damaged(path, f"it has {size} bytes, and should have {nbytes}")
    (mask,), (weights,) = struct.unpack_from("<I", data, 0x20), struct.unpack_from("<Q", data, 0x38)
    if not 0 < mask < 1 << len(SMS):
        raise _damaged(path, f"its GPUs are given as {mask:#x}")
    if weights > nbytes - HEADER_BYTES:
        raise _damaged(path, f"it should hold {weights} bytes of weights in {nbytes}")
    return PlanHeader(version, tuple(sm for i, sm in enumerate(SMS) if mask >> i & 1), nbytes, weights)


def summarize(path: Path) -> PlanSummary:
    """Read a plan's header and program. Raises BundleError as :func:`read_header`."""
    header = read_header(path)
    with open(path, "rb") as file:
        text = file.read(min(header.nbytes - header.weight_bytes, _LARGEST_TEXT))
    constants: Counter[str] = Counter()
    for size, kind in _CONSTANT.findall(text):
        constants[kind.decode()] += int(size)
    operations = [(kind.decode(), _text(name), rest) for kind, name, rest in _OPERATION.findall(text)]
    kinds = Counter(kind for kind, _, _ in operations)
    return PlanSummary(
        header,
        dict(sorted(constants.items())),
        sum(map(int, _REGION.findall(text))),
        kinds["function"],
        kinds["fully_connected"] + kinds["runtime_fusion"],
        _counts(name for kind, name, _ in operations if kind == "runtime_fusion"),
        _counts(name for kind, name, _ in operations if kind == "function"),
        _precisions([rest for kind, _, rest in operations if kind != "function"], text),
    )


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(n.removeprefix("__myl_") for n in names).items()))


def _precisions(products: Sequence[bytes], text: bytes) -> dict[str, str]:
    """For each layer, the types of the matrices that go into its products; what has fewer dimensions does not count."""
    types = {name: kind for dims, name, kind in _TENSOR.findall(text) if len(dims.split()) > 1}
    found: dict[str, set[str]] = {}
    for product in products:
        inputs = _INPUTS.search(product)
        names = inputs.group(1).replace(b'"', b"").split() if inputs else []
        matrices = {types[name].decode() for name in names if name in types}
        layers = [_text(name) for name in _LAYER.findall(product)]
        for layer in [n for n in layers if _PRODUCT.search(n)] or layers[:1]:
            found.setdefault(_NUMBERED.sub("", layer), set()).update(matrices)
    return {layer: ", ".join(sorted(matrices)) for layer, matrices in sorted(found.items())}


def _text(data: bytes) -> str:
    return data.decode("ascii", "replace")


def require_sms(path: Path, sms: tuple[int, ...]) -> None:
    """Raise BundleError unless a plan is for exactly these GPUs."""
    found = read_header(path).sms
    if found != tuple(sorted(sms)):
        raise _damaged(path, f"it is for SM {_list(found)}, and should be for SM {_list(sorted(sms))}")


def _damaged(path: Path, what: str) -> BundleError:
    return BundleError(f"{path} is no plan that can be used: {what}.", hint="Build the engine again.")


def _list(numbers: Any) -> str:
    return ", ".join(map(str, numbers)) or "none"
