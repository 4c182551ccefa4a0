# SPDX-License-Identifier: Apache-2.0
"""Which backend opens an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_build.engines.session import Graph, Session
from nemo_build.errors import BundleError
from nemo_build.plugins import native


def open_session(directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Session:
    """Open a step graph of an engine on the backend it was built for.

    Args:
        directory: The engine.
        manifest: Its manifest.
        graph: Name of the graph, for example ``target``.
        **options: ``slots``, ``context``, ``pending``, ``threads``, ``yields``, ``hidden``, ``taps``, ``state``; see
            :class:`~nemo_build.engines.ort.OrtSession`.

    Raises:
        BundleError: The engine is for a backend that this version does not have, or cannot be opened.
    """
    return _backend(directory, manifest).session(_file(directory, manifest, graph), **options)


def open_graph(directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Graph:
    """The same for a graph that is no step graph; ``outputs`` among its options says what it is to return."""
    return _backend(directory, manifest).graph(_file(directory, manifest, graph), **options)


def require_runnable(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raise BundleError if the backend that an engine was built for cannot run it here."""
    _backend(directory, manifest)


@dataclass(frozen=True)
class Backend:
    """What opens graphs."""

    graph: Callable[..., Graph]
    session: Callable[..., Session]


def _backend(directory: Path, manifest: Mapping[str, Any]) -> Backend:
    name = manifest["backend"]["name"]
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise BundleError(f"{directory} was built for the backend {name!r}; this version has {known}.")
    is_packed = name == "onnxruntime" and manifest["options"]["weights"] not in ("plain", "in-place")
    if is_packed and native.library() is None:
        raise BundleError(
            f"The weights of {directory} are laid out for the native kernels, which are not to be had here.",
            hint="`nemo-build doctor` says why; an engine built with --weights plain runs without them.",
        )
    return BACKENDS[name]()


def _file(directory: Path, manifest: Mapping[str, Any], graph: str) -> Path:
    return directory / str(manifest["graphs"][graph]["file"])


def _onnxruntime() -> Backend:
    from nemo_build.engines.ort import OrtGraph, OrtSession

    return Backend(OrtGraph, OrtSession)


def _tensorrt_rtx() -> Backend:
    from nemo_build.engines.tensorrt_rtx.running import refuse

    raise refuse()


BACKENDS: Mapping[str, Callable[[], Backend]] = {"onnxruntime": _onnxruntime, "tensorrt-rtx": _tensorrt_rtx}
"""What opens graphs, by the name in an engine's manifest."""
