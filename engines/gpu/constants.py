# SPDX-License-Identifier: Apache-2.0
"""Weights that graphs take as inputs: one file of the engine, copied to the device once for all of its graphs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from nemo_build.engines.gpu.device import Device, Memory, Region, require_space
from nemo_build.engines.gpu.executor import Binding
from nemo_build.errors import BundleError

FILE = "weights.bin"
"""The file's name."""

_PIECE = 64 << 20
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "I32": "int32", "I64": "int64"}
_loaded: WeakValueDictionary[tuple[int, ...], Constants] = WeakValueDictionary()


class Constants:
    """The weights of an engine on a device; they stay there while the object is referred to.

    Attributes:
        bindings: Where each is, by the name of the graphs' input.
    """

    def __init__(self, bindings: Mapping[str, Binding], memory: Memory | None) -> None:
        self.bindings = bindings
        self._memory = memory

    @classmethod
    def open(cls, directory: Path, manifest: Mapping[str, Any], device: Device) -> Constants:
        """Those of an engine; loaded, unless another of its graphs is open. Empty if its graphs hold their weights.

        Raises:
            BundleError: The file is shorter than the manifest says.
            PlanError: They do not fit the device.
        """
        if FILE not in manifest["weights"]["files"]:
            return cls({}, None)
        file = (directory / FILE).stat()
        key = file.st_dev, file.st_ino, file.st_mtime_ns, id(device)
        found = _loaded.get(key)
        if found is None:
            found = _loaded[key] = cls._load(directory / FILE, manifest["weights"]["tensors"], device)
        return found

    @classmethod
    def _load(cls, path: Path, tensors: Mapping[str, Mapping[str, Any]], device: Device) -> Constants:
        size = max(t["offset"] + t["nbytes"] for t in tensors.values())
        require_space(device, [("the weights", size)])
        memory = device.allocate(size)
        _copy(path, size, memory.address, device)
        bindings = {
            name: Binding(memory.address + t["offset"], tuple(t["shape"]), _DTYPES[t["dtype"]])
            for name, t in tensors.items()
        }
        return cls(bindings, memory)


def _copy(path: Path, size: int, address: int, device: Device) -> None:
    """Copy a file to the device. A piece is read while the one before it is on its way."""
    pieces = [device.host_array(min(_PIECE, size)) for _ in range(2)]
    with open(path, "rb") as file:
        for i, start in enumerate(range(0, size, _PIECE)):
            piece = pieces[i % 2][: size - start]
            if file.readinto(piece.data) != len(piece):
                raise BundleError(
                    f"{path} has less than the {size} bytes that the manifest says.",
                    hint="Build the engine again.",
                )
            device.synchronize()  # the piece before this one has arrived, and its memory is free for the next
            device.write(Region(address + start, len(piece)), piece)
    device.synchronize()
