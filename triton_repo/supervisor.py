# SPDX-License-Identifier: Apache-2.0
"""What keeps a server going: repairs, and changes of version."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from nemo_build.errors import UserError
from nemo_build.triton_repo import FRONT
from nemo_build.triton_repo.control import Control
from nemo_build.triton_repo.render import versions
from nemo_build.triton_repo.server import Ports, TritonServer

_EVERY = 3.0
"""Seconds between probes."""

_PROBE = 10.0
"""Seconds that a probe may take: repairs that the front makes itself are within it."""

_LOADING = 900.0
"""Seconds for all models to be loaded."""

_MOST_STARTS = 3
"""Starts of the server in a row that lead to nothing."""

_DRAINING = 3600.0
"""Seconds for a version to answer what it was asked."""


class Supervisor:
    """Runs a server, and repairs it when it does not answer any more.

    The server says that it is ready although a process of its models has died. So it is asked for a token every few
    seconds. If that fails, its models are loaded again, and if that does not help, all of it is started again.

    Args:
        repository: Its models; the newest version is served.
        ports: Where it listens.
        say: Told of what happens, a line each.
        log: Where the server's own messages go; standard error if there is none.
        every: Seconds between probes.
    """

    def __init__(
        self,
        repository: Path,
        ports: Ports,
        say: Callable[[str], None],
        *,
        log: BinaryIO | None = None,
        every: float = _EVERY,
    ) -> None:
        self._repository, self._ports, self._say, self._log, self._every = repository, ports, say, log, every
        self._control = Control(f"127.0.0.1:{ports.http}")

    def run(self) -> None:
        """Serve until an exception comes, such as an interruption.

        Raises:
            UserError: The server does not start, or not again.
        """
        starts = 0
        while True:
            served = max(versions(self._repository).items())
            version, models = served[0], served[1].all_models
            starts += 1
            with TritonServer(self._repository, self._ports, models=models, log=self._log) as server:
                server.wait(_LOADING)
                self._say(f"version {version} is served at http://127.0.0.1:{self._ports.http}")
                while self._works(server):
                    starts = 0
            if starts == _MOST_STARTS:
                raise UserError(
                    f"The server does not answer, though it was started {starts} times.",
                    hint="Its messages say why.",
                )
            self._say("the server is started again")

    def _works(self, server: TritonServer) -> bool:
        """Whether it goes on, repaired if need be."""
        is_alive = server.alive()
        problem = self._control.probe(_PROBE) if is_alive else None
        if is_alive and problem is None:
            time.sleep(self._every)
            return True
        if not server.alive():
            self._say(f"the server ended with exit code {server.process.returncode}")
            return False
        self._say(f"{problem}; its models are loaded again")
        served = versions(self._repository).get(self._served())
        if served is None:
            self._say("the version that the server has is not in the repository any more")
            return False
        try:
            self._control.reload(served.all_models)
        except UserError as error:
            self._say(str(error))
            return False
        problem = self._control.probe(_PROBE)
        self._say("it answers again" if problem is None else problem)
        return problem is None

    def _served(self) -> int:
        """The version that the server has: another one may have been loaded since it was started."""
        ready = [v for v, state in self._control.states(FRONT).items() if state == "READY"]
        return max(ready, default=max(versions(self._repository)))


def reload(repository: Path, control: Control, say: Callable[[str], None]) -> int:
    """Have a server change to the newest version in its repository, without a request lost.

    Args:
        repository: The repository that the server has, or a copy of it.
        control: The server.
        say: Told of what happens, a line each.

    Returns:
        The version that is served now.

    Raises:
        UserError: The version cannot be loaded; the server goes on with the one that it had.
    """
    every = versions(repository)
    newest = max(every)
    before = [v for v, state in control.states(FRONT).items() if state == "READY"]
    if before == [newest]:
        say(f"version {newest} is served already")
        return newest
    steps = list(every[newest].models.values())
    loaded: list[str] = []
    start = time.monotonic()
    try:
        for name in (*steps, FRONT):
            control.load(name)
            loaded.append(name)
    except UserError:
        for name in reversed([n for n in loaded if n != FRONT]):
            with suppress(UserError):
                control.unload(name)
        raise
    say(f"version {newest} is served, after {time.monotonic() - start:.1f} s")
    old = [v for v in before if v != newest]
    if not control.wait_until_gone(FRONT, old, _DRAINING):
        say(f"version {', '.join(map(str, old))} still answers; its steps stay loaded")
        return newest
    for version in old:
        for name in reversed(list(every[version].models.values()) if version in every else []):
            control.unload(name)
    return newest
