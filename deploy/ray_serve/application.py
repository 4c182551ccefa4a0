# SPDX-License-Identifier: Apache-2.0
"""The application: ``serve run nemo_build.deploy.ray_serve.application:application engine=/engines/nemotron``."""

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from nemo_build.deploy.ray_serve.ingress import Ingress
from nemo_build.deploy.ray_serve.replica import EngineReplica

# No postponed annotations here: Serve reads the class of the builder's argument from its signature.

ROUTER = "nemo_build.deploy.ray_serve.routing:PrefixRouter"
REPLICAS = "EngineReplica"
"""Name of the deployment of the engines."""

MOST_REQUESTS = 1000
"""Requests that an ingress holds, and that wait for one; further ones get the status 503."""


class Settings(BaseModel):
    """What can be said about the application, on the command line or in Serve's configuration file.

    Attributes:
        engine: The engine's directory, the same on every node.
        min_replicas: Least replicas.
        max_replicas: Most replicas.
        gpus: GPUs of a replica; 0 for a CPU engine.
        cpus: CPUs of a replica.
        accelerator: Ray's name of the GPU that the engine was built for; empty: nodes have one kind only.
        max_sequences: Sequences that a replica runs at a time. More requests than that a replica make new replicas.
        max_waiting: Further requests that a replica takes; beyond, they wait in front of all replicas.
        max_context: Positions of a sequence; unset: what the engine was built for.
        threads: CPU threads of a replica; unset: as many as CPUs.
        speculate: Where drafts come from.
        prefix_cache: Bytes of a replica's prefix cache.
        attempts: Replicas that are tried for a request.
        allowance: Requests that a replica may have more than the least busy one and still get those that fit its cache.
        ingresses: Replicas of the HTTP side.
        upscale_delay: Seconds of more load before replicas are added.
        downscale_delay: Seconds of less load before replicas are removed.
        drain: Seconds that a replica which is to go may take for its requests.
        health_period: Seconds between health checks.
        health_patience: Seconds that an engine may take for the token that a check asks for.
    """

    model_config = ConfigDict(extra="forbid")

    engine: str
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    gpus: float = Field(0, ge=0)
    cpus: float = Field(1, ge=0)
    accelerator: str = ""
    max_sequences: int = Field(8, ge=1)
    max_waiting: int = Field(16, ge=0)
    max_context: int | None = None
    threads: int | None = None
    speculate: str = "none"
    prefix_cache: int = Field(0, ge=0)
    attempts: int = Field(3, ge=1)
    allowance: int = Field(4, ge=0)
    ingresses: int = Field(1, ge=1)
    upscale_delay: float = 10
    downscale_delay: float = 600
    drain: float = 120
    health_period: float = Field(10, gt=0)
    health_patience: float = Field(25, gt=0)


def application(settings: Settings) -> serve.Application:
    """The application for :func:`ray.serve.run` and the ``serve`` command."""
    options = {
        name: getattr(settings, name)
        for name in ("max_sequences", "max_context", "speculate", "prefix_cache")
    }
    options["threads"] = settings.threads or max(1, round(settings.cpus))
    resources: dict[str, object] = {"num_cpus": settings.cpus, "num_gpus": settings.gpus}
    if settings.accelerator:
        resources["accelerator_type"] = settings.accelerator
    replicas = serve.deployment(
        name=REPLICAS,
        ray_actor_options=resources,
        max_ongoing_requests=settings.max_sequences + settings.max_waiting,
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            target_ongoing_requests=settings.max_sequences,
            upscale_delay_s=settings.upscale_delay,
            downscale_delay_s=settings.downscale_delay,
        ),
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTER,  # type: ignore[arg-type]
            request_router_kwargs={"allowance": settings.allowance},
        ),
        health_check_period_s=settings.health_period,
        health_check_timeout_s=settings.health_patience + 5,
        graceful_shutdown_timeout_s=settings.drain,
    )(EngineReplica)
    front = serve.deployment(
        num_replicas=settings.ingresses,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=MOST_REQUESTS,
        max_queued_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=settings.drain,
    )(Ingress)
    engines = replicas.bind(settings.engine, options, settings.health_patience)
    return front.bind(engines, settings.attempts)
