# SPDX-License-Identifier: Apache-2.0
"""Servers on the demo engine."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_build.runtime import Engine
from nemo_build.runtime.opening import Options
from nemo_build.triton_repo.control import Control
from nemo_build.triton_repo.render import render
from nemo_build.triton_repo.server import Ports, TritonServer

from .running import Running

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of it is slow, and skipped where there is no server."""
    missing = [n for n in ("pytriton", "tritonclient") if importlib.util.find_spec(n) is None]
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if missing:
                item.add_marker(
                    pytest.mark.skip(reason="needs the extra triton, in an environment of its own")
                )


@pytest.fixture(scope="session")
def plain(demo_engine_directory) -> Engine:
    """The same engine in this process."""
    return Engine.load(demo_engine_directory)


@pytest.fixture(scope="session")
def serve(demo_engine_directory, tmp_path_factory):
    """Start a server on the demo engine with options of its own."""

    @contextmanager
    def start(*, in_process: bool = False, most_waiting: int = 256, **options) -> Iterator[Running]:
        folder = tmp_path_factory.mktemp("triton")
        rendered = render(
            demo_engine_directory,
            folder / "repository",
            Options(threads=1, **options),
            in_process=in_process,
            most_waiting=most_waiting,
        )
        ports = Ports.free()
        models = [*rendered.models, "generate"]
        with (
            (folder / "log").open("wb") as log,
            TritonServer(rendered.repository, ports, models=models, log=log) as server,
        ):
            server.wait(60)
            yield Running(rendered.repository, server, Control(f"127.0.0.1:{ports.http}"), folder / "log")

    return start


@pytest.fixture(scope="session")
def mtp(serve) -> Iterator[Running]:
    """A server that speculates, with a prefix cache. Its models are to be left as they are."""
    with serve(speculate="mtp", prefix_cache=8 << 20) as running:
        yield running
