# SPDX-License-Identifier: Apache-2.0
"""The router of Ray Serve that uses :class:`~.affinity.Affinity`.

Its interface (``ray.serve.request_router``) is marked alpha in Ray 2.60, which is why the version is pinned.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nemo_build.deploy.ray_serve.affinity import Affinity, block_keys


class PrefixRouter(RequestRouter):
    """Routes calls of :meth:`~.replica.EngineReplica.stream`, whose first two arguments are prompt and salt.

    Serve passes ``allowance`` (see :class:`~.affinity.Affinity`) from the deployment's configuration.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        self._affinity = Affinity(int(kwargs["allowance"]))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica a rank: the next one is asked if the one before takes no more requests."""
        if pending_request is not None:
            # Without this, Serve's loop asks again at once when all are full.
            pending_request.routing_context.should_backoff = True
        known = self.replica_queue_len_cache
        replicas = {r.replica_id.unique_id: r for r in candidate_replicas}
        loads = {name: known.get(r.replica_id) or 0 for name, r in replicas.items()}
        return [[replicas[name]] for name in self._affinity.rank(_keys(pending_request), loads)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._affinity.note(_keys(pending_request), replica_id.unique_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._affinity.keep([r.replica_id.unique_id for r in replicas])


def _keys(request: PendingRequest | None) -> tuple[bytes, ...]:
    """A request's blocks; calls of other methods have none."""
    if request is None or len(request.args) < 2:
        return ()
    return block_keys(*request.args[:2])
