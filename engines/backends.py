# SPDX-License-Identifier: Apache-2.0
"""Which backend opens an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nemo_build.engines.session import Graph, Session
from nemo_build.errors import BundleError, UserError
from nemo_build.plugins import native
from nemo_build.state import RECURRENT

if TYPE_CHECKING:
    from nemo_build.engines.gpu.opening import GpuBackend
    from nemo_build.engines.trt import Library


def open_session(directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Session:
    """Open a step graph of an engine on the backend it was built for.

    Args:
        directory: The engine.
        manifest: Its manifest.
        graph: Name of the graph, for example ``target``.
        **options: ``slots``, ``context``, ``pending``, ``threads``, ``yields``, ``hidden``, ``taps``, ``state``; see
            :class:`~nemo_build.engines.ort.OrtSession` and :class:`~nemo_build.engines.gpu.session.GpuSession`.

    Raises:
        BundleError: The engine is for a backend that this version does not have, or cannot be opened.
    """
    return _backend(directory, manifest).session(directory, manifest, graph, **options)


def open_graph(directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Graph:
    """The same for a graph that is no step graph; ``outputs`` among its options says what it is to return."""
    return _backend(directory, manifest).graph(directory, manifest, graph, **options)


def require_runnable(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raise BundleError if the backend that an engine was built for cannot run it here."""
    _backend(directory, manifest).require(directory, manifest)


def engine_graphs(directory: Path, manifest: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """The graphs that :func:`open_session` opens, by name, with what a manifest says of their ``state``.

    Compiled graphs are several for each of these.
    """
    return _backend(directory, manifest).graphs(manifest)


def pending_tokens(directory: Path, manifest: Mapping[str, Any], least: int) -> int:
    """Tokens of a slot that a step of an engine may leave uncommitted, where at least so many are to be.

    Raises:
        RequestError: The engine was built for fewer.
    """
    return _backend(directory, manifest).pending(manifest, least)


def runs_on_host(directory: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether an engine's state is in memory of the host, of which a page counts when it is used."""
    return _backend(directory, manifest).on_host


class Backend(Protocol):
    """What opens graphs.

    Attributes:
        on_host: Whether their state is in memory of the host.
    """

    on_host: bool

    def require(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        """Raise BundleError if it cannot run an engine here."""
        ...

    def graphs(self, manifest: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """See :func:`engine_graphs`."""
        ...

    def pending(self, manifest: Mapping[str, Any], least: int) -> int:
        """See :func:`pending_tokens`."""
        ...

    def graph(self, directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Graph:
        """See :func:`open_graph`."""
        ...

    def session(self, directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Session:
        """See :func:`open_session`."""
        ...


class _OnnxRuntime:
    """ONNX Runtime on the CPU."""

    on_host = True

    def require(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        is_packed = manifest["options"]["weights"] not in ("plain", "in-place")
        if is_packed and native.library() is None:
            raise BundleError(
                f"The weights of {directory} are laid out for the native kernels, which are not to be had here.",
                hint="`nemo-build doctor` says why; an engine built with --weights plain runs without them.",
            )

    def graphs(self, manifest: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        graphs: Mapping[str, Mapping[str, Any]] = manifest["graphs"]
        return graphs

    def pending(self, manifest: Mapping[str, Any], least: int) -> int:
        return least

    def graph(self, directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Graph:
        from nemo_build.engines.ort import OrtGraph

        self.require(directory, manifest)
        return OrtGraph(directory / str(manifest["graphs"][graph]["file"]), **options)

    def session(self, directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Session:
        from nemo_build.engines.ort import OrtSession

        self.require(directory, manifest)
        return OrtSession(directory / str(manifest["graphs"][graph]["file"]), **options)


class OnGpu:
    """A backend for GPUs; its parts are imported when it is used.

    Args:
        load: Gives it.
    """

    on_host = False

    def __init__(self, load: Callable[[], GpuBackend]) -> None:
        self._load = load

    def require(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        """See :class:`Backend`; all reasons are named."""
        self._load().require(manifest)

    def graphs(self, manifest: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """See :class:`Backend`."""
        from nemo_build.engines.gpu.contract import portable_graphs

        return portable_graphs(manifest)

    def pending(self, manifest: Mapping[str, Any], least: int) -> int:
        """See :class:`Backend`; the graphs have one number of them."""
        from nemo_build.engines.gpu.contract import pending_of

        return pending_of(manifest, least)

    def graph(self, directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Graph:
        """See :class:`Backend`."""
        from nemo_build.engines.gpu.session import GpuGraph

        return GpuGraph(self._load().place(directory, manifest), graph, **options)

    def session(self, directory: Path, manifest: Mapping[str, Any], graph: str, **options: Any) -> Session:
        """See :class:`Backend`."""
        from nemo_build.engines.gpu.session import GpuSession

        return GpuSession(self._load().place(directory, manifest), graph, **options)


def _backend(directory: Path, manifest: Mapping[str, Any]) -> Backend:
    name = manifest["backend"]["name"]
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise BundleError(f"{directory} was built for the backend {name!r}; this version has {known}.")
    return BACKENDS[name]


def _tensorrt_rtx() -> GpuBackend:
    from nemo_build.engines.tensorrt_rtx import LIBRARY

    return _plans(LIBRARY, doubled=RECURRENT)


def _tensorrt() -> GpuBackend:
    from nemo_build.engines.tensorrt import LIBRARY

    return _plans(LIBRARY, doubled=())


def _onnxruntime_cuda() -> GpuBackend:
    from nemo_build.engines.gpu.opening import GpuBackend
    from nemo_build.engines.ort_cuda.executor import missing, open_graphs

    return GpuBackend("ONNX Runtime on CUDA", open_graphs, missing)


def _plans(library: Library, doubled: tuple[str, ...]) -> GpuBackend:
    """The backend of plans that a library compiled."""
    from nemo_build.engines.gpu.opening import GpuBackend
    from nemo_build.engines.trt.executor import opener

    return GpuBackend(library.title, opener(library), partial(_missing, library), doubled)


def _missing(library: Library) -> list[str]:
    try:
        library.require()
    except UserError as error:
        return [f"{error.headline} {error.hint}"]
    return []


BACKENDS: Mapping[str, Backend] = {
    "onnxruntime": _OnnxRuntime(),
    "tensorrt-rtx": OnGpu(_tensorrt_rtx),
    "tensorrt": OnGpu(_tensorrt),
    "onnxruntime-cuda": OnGpu(_onnxruntime_cuda),
}
"""What opens graphs, by the name in an engine's manifest."""
