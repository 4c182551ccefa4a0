# SPDX-License-Identifier: Apache-2.0
"""What an engine was made with, and whether it is what is here.

A build records versions and interfaces in the engine's manifest; :func:`check_engine` compares them, and the digests
of the files, when the engine is opened. An engine that was made with something else is refused with all that differs
and the command that makes it again, rather than run to see what happens.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_build.bundle import check_files, sha256_json
from nemo_build.engines.machine import query_gpus
from nemo_build.errors import BundleError
from nemo_build.plugins import panels
from nemo_build.plugins.registry import plugins_by_name
from nemo_build.plugins.schema import OPSET_VERSION, Op


def kernel_interface() -> dict[str, Any]:
    """What an engine's graphs and weights take for granted of the kernels, for the manifest.

    The version of the ops' domain, and digests of their signatures and of the layout of packed weights. They depend on
    neither machine nor compiler, unlike a digest of the native libraries, of which each processor has its own.
    """
    signatures = {name: _signature(plugin.op) for name, plugin in sorted(plugins_by_name().items())}
    layout = {
        "rows": panels.ROWS,
        "depth": panels.DEPTH,
        "chunk": panels.CHUNK,
        "formats": {name: asdict(form) for name, form in sorted(panels.FORMATS.items())},
    }
    return {
        "opset": OPSET_VERSION,
        "ops_sha256": sha256_json(signatures),
        "panels_sha256": sha256_json(layout),
    }


def check_engine(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Check that an engine is whole, and was made with what is here.

    Graphs and text files are compared by digest, weights by size (``inspect --verify`` reads them whole).

    Raises:
        BundleError: It is damaged, or was made with something else; all that differs is named.
    """
    check_files(directory, manifest["files"] | {g["file"]: g["sha256"] for g in manifest["graphs"].values()})
    damage = _damaged_weights(directory, manifest)
    if damage:
        raise BundleError("The engine's weights are damaged:", damage, "Build the engine again.")
    found = mismatches(manifest)
    if found:
        raise BundleError(
            f"{directory} was made with something else than what is here:",
            found,
            f"Build it again: {rebuild_command(directory, manifest)}",
        )


def mismatches(manifest: Mapping[str, Any]) -> list[str]:
    """All ways in which what an engine was made with is not what is here."""
    check = BACKEND_CHECKS.get(manifest["backend"]["name"])
    return [*_kernel_mismatches(manifest), *(check(manifest["backend"]) if check else ())]


def rebuild_command(directory: Path, manifest: Mapping[str, Any]) -> str:
    """The command that makes an engine again from its bundle, wherever that is."""
    made = {"target": manifest["target"], "backend": manifest["backend"]["name"], **manifest["options"]}
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in made.items())
    return f"nemo-build build BUNDLE -o {directory} --force {options}"


def gpu_capabilities() -> list[int]:
    """Compute capability times ten of each GPU as ``nvidia-smi`` tells; empty if there is none."""
    try:
        lines = query_gpus("compute_cap")
    except OSError:
        return []
    return [round(10 * float(line)) for line in lines if line.replace(".", "", 1).isdecimal()]


def _signature(op: Op) -> dict[str, Any]:
    """An op without its prose."""
    plain = asdict(op)
    kept = {key: plain[key] for key in ("types", "aliases")}
    for side in ("inputs", "outputs"):
        kept[side] = [[p.name, p.type, p.optional, p.variadic] for p in getattr(op, side)]
    kept["attributes"] = [[a.name, a.kind.__name__, a.default] for a in op.attributes]
    return kept


def _damaged_weights(directory: Path, manifest: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in manifest["weights"]["files"]:
        size, path = manifest["sizes"][name], directory / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            has = "but is missing" if found is None else f"but has {found}"
            problems.append(f"{path} should have {size} bytes, {has}")
    return problems


_NAMES = {
    "opset": "version of the ops",
    "ops_sha256": "signatures of the ops",
    "panels_sha256": "layout of packed weights",
}


def _kernel_mismatches(manifest: Mapping[str, Any]) -> list[str]:
    recorded = manifest.get("kernels", {})
    return [
        f"{_NAMES[name]}: made for {recorded.get(name, 'an unknown one')!s:.16}, here is {here!s:.16}"
        for name, here in kernel_interface().items()
        if recorded.get(name) != here
    ]


def _onnxruntime(backend: Mapping[str, Any]) -> list[str]:
    """Patch releases are taken for each other; others may compute otherwise than what was tested."""
    import onnxruntime

    built, here = backend["version"], onnxruntime.__version__
    if built.split(".")[:2] == here.split(".")[:2]:
        return []
    return [f"onnxruntime: made for {built}, here is {here}"]


def check_compiled(backend: Mapping[str, Any], version: str | None) -> list[str]:
    """The checks of a backend that compiles for GPUs: its exact version, and the GPUs' compute capability.

    Args:
        backend: Name, ``version`` and ``sms`` (the compute capabilities times ten that it was compiled for).
        version: The version that is here; ``None`` if it is not installed.
    """
    found = []
    if version != backend["version"]:
        found.append(f"{backend['name']}: made for {backend['version']}, here is {version or 'none'}")
    return [*found, *_gpu_mismatches(backend)]


def _gpu_mismatches(backend: Mapping[str, Any]) -> list[str]:
    """Whether the GPUs here are others than an engine is for; that there is none at all is for the backend to tell."""
    here, made = gpu_capabilities(), backend["sms"]
    if not here or set(here) & set(made):
        return []
    sms = [", ".join(f"SM {sm}" for sm in side) for side in (made, here)]
    return [f"GPU: made for {sms[0]}, here is {sms[1]}"]


def _tensorrt_rtx(backend: Mapping[str, Any]) -> list[str]:
    """Plans are for one exact version of the library."""
    from nemo_build.engines.tensorrt_rtx import LIBRARY

    return check_compiled(backend, LIBRARY.installed_version())


def _tensorrt(backend: Mapping[str, Any]) -> list[str]:
    """Plans are for one exact version of the library, and hold the kernels that they were built with.

    Kernels are compared where Triton is installed, whose compiler gives their digests; plans run without it.
    """
    from nemo_build.engines.tensorrt import LIBRARY

    found = check_compiled(backend, LIBRARY.installed_version())
    if importlib.util.find_spec("triton") is not None:
        from nemo_build.engines.tensorrt.kernels import changed_kernels

        changed = changed_kernels(backend["kernels"])
        if changed:
            found.append(f"GPU kernels: made with others than this version has of {', '.join(changed)}")
    return found


def _onnxruntime_cuda(backend: Mapping[str, Any]) -> list[str]:
    """Standard ops are ONNX Runtime's, and kernels are machine code for one GPU."""
    return [*_onnxruntime(backend), *_gpu_mismatches(backend)]


BACKEND_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], list[str]]] = {
    "onnxruntime": _onnxruntime,
    "tensorrt-rtx": _tensorrt_rtx,
    "tensorrt": _tensorrt,
    "onnxruntime-cuda": _onnxruntime_cuda,
}
"""What differs between a manifest's ``backend`` and what is here, by the backend's name."""
