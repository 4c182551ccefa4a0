# SPDX-License-Identifier: Apache-2.0
"""What all routes share."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

from nemo_build import __version__
from nemo_build.runtime.server.backend import Backend
from nemo_build.runtime.server.limits import Gate
from nemo_build.runtime.server.metrics import Metrics
from nemo_build.runtime.server.tracing import Tracing, open_tracing

__all__ = ["ServerContext", "Settings"]


@dataclass(frozen=True)
class Settings:
    """How to serve.

    Attributes:
        names: Names of the model, the first of which answers bear; none: the backend's.
        keys: API keys; none: no request needs one.
        origins: Origins that browsers may call from, besides the server's own; ``*``: any.
        max_waiting: Answers that may wait for a slot.
        max_request_bytes: Of a body.
        timeout: Seconds that an answer may take; ``None``: any time.
        metrics_alias: As of :class:`~nemo_build.runtime.server.metrics.Metrics`.
        is_local: The server listens on the loopback address only; see :class:`~nemo_build.runtime.server.limits.Edge`.
    """

    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    max_waiting: int = 256
    max_request_bytes: int = 16 << 20
    timeout: float | None = None
    metrics_alias: str | None = None
    is_local: bool = False


@dataclass
class ServerContext:
    """What all routes share.

    Attributes:
        backend: What generates.
        metrics: What is counted.
        gate: Who may come in.
        names: Names of the model; answers bear the first.
        timeout: As of :class:`Settings`.
        fingerprint: Of what generates: the same for the same engine and version.
        tracing: Makes spans.
        started: When, in seconds since 1970.
    """

    backend: Backend
    metrics: Metrics
    gate: Gate
    names: tuple[str, ...]
    timeout: float | None
    fingerprint: str
    tracing: Tracing
    started: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, backend: Backend, settings: Settings) -> ServerContext:
        """What the routes of a server share that is served so."""
        names = settings.names or (backend.name,)
        parts = (__version__, backend.target, repr(backend.spec))
        digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=5).hexdigest()
        return cls(
            backend,
            Metrics(backend, names[0], alias=settings.metrics_alias),
            Gate(backend.slots + settings.max_waiting),
            names,
            settings.timeout,
            f"fp_{digest}",
            open_tracing(),
        )

    @property
    def name(self) -> str:
        """The name that answers bear."""
        return self.names[0]
