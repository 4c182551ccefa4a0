# SPDX-License-Identifier: Apache-2.0
"""Shared fixtures: a small random checkpoint, and the demo checkpoint's engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

from nemo_build.settings import cpus

settings.register_profile("shared-machine", deadline=None)  # timed assertions do not belong into tests
settings.load_profile("shared-machine")

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _share_cpus() -> None:
    """Give each of several workers its part: threads that wait for work would take the CPUs from the other workers."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        for variable in ("NEMO_BUILD_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(variable, str(max(1, cpus() // workers)))


_share_cpus()


@pytest.fixture(scope="session", autouse=True)
def private_cache(tmp_path_factory) -> Path:
    """Keep the build cache of the tests to themselves; several workers share what kernels are compiled to."""
    path = tmp_path_factory.mktemp("cache")
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = tmp_path_factory.getbasetemp().parent / "kernels"
        shared.mkdir(exist_ok=True)
        (path / "kernels").symlink_to(shared, target_is_directory=True)
    os.environ["NEMO_BUILD_CACHE"] = str(path)
    return path


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """A random checkpoint with every block kind and an MTP module. Treat as read-only."""
    from .mtp_reference import save_with_mtp
    from .tiny import KINDS

    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    save_with_mtp(directory, **KINDS["hybrid"])
    return directory


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint, tmp_path_factory) -> Path:
    """The model bundle of the random checkpoint. Treat as read-only."""
    from nemo_build.export.exporter import export_bundle

    return export_bundle(tiny_checkpoint, tmp_path_factory.mktemp("tiny") / "bundle").out


@pytest.fixture(scope="session")
def demo_engine_directory(tmp_path_factory) -> Path:
    """An engine of the demo checkpoint and its drafters, with float32 activations. Treat as read-only."""
    from nemo_build.demo import CHECKPOINT, DRAFTERS
    from nemo_build.engines.build import BuildOptions, build_engine
    from nemo_build.export.exporter import export_bundle

    directory = tmp_path_factory.mktemp("demo")
    export_bundle(CHECKPOINT, directory / "bundle", drafts=list(DRAFTERS.values()))
    options = BuildOptions(max_sequences=4, max_context=1024, activations="float32")
    return build_engine(directory / "bundle", directory / "engine", options=options).out
