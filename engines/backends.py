# SPDX-License-Identifier: Apache-2.0
"""Which backend opens an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nemo_build.engines.session import Session
from nemo_build.errors import BundleError
from nemo_build.plugins import native


def open_session(
    directory: Path,
    manifest: Mapping[str, Any],
    graph: str,
    *,
    slots: int,
    context: int,
    pending: int = 0,
    threads: int = 0,
    hidden: bool = False,
) -> Session:
    """Open one graph of an engine on the backend it was built for.

    Args:
        directory: The engine.
        manifest: Its manifest.
        graph: Name of the graph, for example ``target``.
        slots: State slots.
        context: Positions per slot.
        pending: Tokens per slot that a step may leave uncommitted.
        threads: CPU threads; 0 lets the backend choose.
        hidden: Whether steps return the hidden states.

    Raises:
        BundleError: The engine is for a backend that this version does not have, or cannot be opened.
    """
    name = manifest["backend"]["name"]
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise BundleError(f"{directory} was built for the backend {name!r}; this version has {known}.")
    if manifest["options"]["weights"] not in ("plain", "in-place") and native.library() is None:
        raise BundleError(
            f"The weights of {directory} are laid out for the native kernels, which are not to be had here.",
            hint="`nemo-build doctor` says why; an engine built with --weights plain runs without them.",
        )
    sizes = {"slots": slots, "context": context, "pending": pending}
    return BACKENDS[name](
        directory / manifest["graphs"][graph]["file"], threads=threads, hidden=hidden, **sizes
    )


def _onnxruntime(model: Path, **options: Any) -> Session:
    from nemo_build.engines.ort import OrtSession

    return OrtSession(model, **options)


BACKENDS: Mapping[str, Callable[..., Session]] = {"onnxruntime": _onnxruntime}
"""What opens a graph, by the name in an engine's manifest."""
