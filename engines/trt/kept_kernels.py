# SPDX-License-Identifier: Apache-2.0
"""Kernels that TensorRT-RTX compiled for a plan on this GPU, kept in a file for the processes that come after.

The library compiles a plan's kernels when they are first used, again in each process. It knows itself whether what was
kept is for this GPU, driver and version, and takes nothing else.
"""

from __future__ import annotations

import os
import warnings
import weakref
from pathlib import Path
from typing import Any

from nemo_build.engines.gpu.device import Device
from nemo_build.settings import cache_directory


class KeptKernels:
    """The kernels of one plan; they are written when the object or the process ends.

    Args:
        config: The library's settings of the plan's contexts, which are told of them.
        digest: Of the plan.
        device: The GPU.
    """

    def __init__(self, config: Any, digest: str, device: Device) -> None:
        path = cache_directory() / "kernels" / f"{digest}-sm{device.sm}.bin"
        kept = path.read_bytes() if path.is_file() else b""
        cache = config.create_runtime_cache()
        is_taken = bool(kept) and cache.deserialize(kept)
        config.set_runtime_cache(cache)
        weakref.finalize(self, _save, cache, path, kept if is_taken else b"", device)


def _save(cache: Any, path: Path, kept: bytes, device: Device) -> None:
    """Write what there is, unless it is what was read. A process that fails to does without."""
    device.activate()
    data = bytes(cache.serialize())
    if not data or data == kept:
        return
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(data)
        os.replace(part, path)
    except OSError as error:
        warnings.warn(f"Compiled kernels cannot be kept for later processes: {error}", stacklevel=2)
        part.unlink(missing_ok=True)
