# SPDX-License-Identifier: Apache-2.0
"""Builds on the nodes of a Ray cluster.

A node that can build for a target says so with the custom resource ``nemo_target_NAME``, for example
``ray start --address=HEAD:6379 --resources='{"nemo_target_h100": 1}'``; the number is how many builds at a time it
takes. A build is an actor that holds one of them. It runs the same process as a build on this machine, whose events
are polled, and hands over the engine piece by piece. Nodes need this version of nemo-build, and the bundle and its
checkpoint under the same paths as here (shared storage).
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import nemo_build
from nemo_build.bundle import ENGINE_BUNDLE, is_bundle, publish, read_manifest, require_output, sha256_file
from nemo_build.engines.fanout import LocalRunner, Report
from nemo_build.engines.worker import BuildJob
from nemo_build.errors import BundleError, UserError

SCHEME = "ray://"

_PIECE = 1 << 24  # bytes of a file in one message
_POLL = 0.5  # seconds
_SHOWN = 5  # last lines of Ray's own errors, which are long


def resource_of(target: str) -> str:
    """The custom resource of nodes that build for a target."""
    return f"nemo_target_{target}"


class RemoteBuild:
    """A build on a node; an actor. Files are below a temporary directory that :meth:`close` removes."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="nemo-build-"))
        self._runner = LocalRunner()
        self._events: list[dict[str, Any]] = []
        self._finished = False

    def describe(self) -> dict[str, str]:
        """The node's name and its version of nemo-build."""
        return {"node": socket.gethostname(), "nemo_build": nemo_build.__version__}

    def start(self, data: Mapping[str, Any]) -> None:
        """Begin the job, whose output is put into this node's directory."""
        job = replace(BuildJob.from_json(dict(data)), out=str(self._folder / "engine"), force=False)
        threading.Thread(target=self._run, args=(job,), daemon=True).start()

    def _run(self, job: BuildJob) -> None:
        try:
            result = self._runner.run(job, lambda job, event: self._events.append(event))
            self._events.append({"event": "result", **result})
        except UserError as error:
            problem = {"headline": error.headline, "problems": list(error.problems), "hint": error.hint}
            self._events.append({"event": "error", **problem})
        self._finished = True

    def poll(self, seen: int) -> tuple[list[dict[str, Any]], bool]:
        """The events after the first `seen`, and whether there will be no more."""
        finished = self._finished
        return self._events[seen:], finished

    def files(self) -> dict[str, tuple[int, str]]:
        """Size and sha256 of the engine's files by name."""
        root = self._folder / "engine"
        paths = sorted(p for p in root.rglob("*") if p.is_file())
        return {p.relative_to(root).as_posix(): (p.stat().st_size, sha256_file(p)) for p in paths}

    def read(self, name: str, offset: int) -> bytes:
        """A piece of a file."""
        with open(self._folder / "engine" / name, "rb") as file:
            file.seek(offset)
            return file.read(_PIECE)

    def close(self) -> None:
        """End what is running and remove all files."""
        self._runner.stop()
        while not self._finished and self._runner.is_running():
            time.sleep(0.05)
        shutil.rmtree(self._folder, ignore_errors=True)


class RayRunner:
    """Runs builds on a cluster.

    Args:
        address: ``ray://HOST:PORT`` of the cluster's Ray Client server.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
    """

    def __init__(self, address: str) -> None:
        if not address.startswith(SCHEME):
            raise UserError(f"--on takes the address of a Ray cluster, {SCHEME}HOST:PORT, not {address!r}.")
        try:
            import ray
        except ImportError as error:
            raise UserError(
                f"Builds on a cluster need Ray, which cannot be imported: {error}.",
                hint="Install it with `pip install 'nemo-build[ray]'`.",
            ) from error
        self._ray = ray
        self._address = address
        self._stopped = threading.Event()
        try:
            ray.init(address, logging_level=logging.ERROR, log_to_driver=False)
        except Exception as error:  # Ray has no common error for "cannot connect"
            raise UserError(
                f"Cannot connect to {address}:", str(error).strip().splitlines()[-_SHOWN:]
            ) from error

    def __enter__(self) -> RayRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, job: BuildJob, report: Report) -> dict[str, Any]:
        """Do a job on a node that declares its target's resource, and fetch the engine."""
        out = Path(job.out)
        require_output(out, force=job.force, source=Path(job.bundle))
        self._require_node(job.target)
        resources = {resource_of(job.target): 1}
        actor = self._ray.remote(RemoteBuild).options(num_cpus=0, resources=resources).remote()
        try:
            return self._follow(actor, job, report, out)
        except self._ray.exceptions.RayError as error:
            raise UserError(
                "The build's node failed:",
                str(error).strip().splitlines()[-_SHOWN:],
                "Nodes need nemo-build of this version, and bundle and checkpoint under the same paths as here.",
            ) from error
        finally:
            self._end(actor)

    def stop(self) -> None:
        """Make all builds end."""
        self._stopped.set()

    def _require_node(self, target: str) -> None:
        declared = {
            name: count
            for name, count in self._ray.cluster_resources().items()
            if name.startswith(resource_of(""))
        }
        wanted = resource_of(target)
        if declared.get(wanted, 0) < 1:
            raise UserError(
                f"No node of {self._address} builds for {target}: none declares the resource {wanted}.",
                [f"{name}: {count:g}" for name, count in sorted(declared.items())],
                f"Start one with `ray start --address=... --resources='{{\"{wanted}\": 1}}'`.",
            )

    def _follow(self, actor: Any, job: BuildJob, report: Report, out: Path) -> dict[str, Any]:
        described = self._get(actor.describe.remote())
        node = described["node"]
        if described["nemo_build"] != nemo_build.__version__:
            raise UserError(
                f"{node} has nemo-build {described['nemo_build']}, this is {nemo_build.__version__}.",
                hint="Install the same version on both.",
            )
        report(job, {"event": "log", "line": f"builds on {node}"})
        self._get(actor.start.remote(job.to_json()))
        seen, finished, last = 0, False, dict[str, Any]()
        while not finished:
            events, finished = self._get(actor.poll.remote(seen))
            seen += len(events)
            for last in events:
                if last["event"] not in ("result", "error"):
                    report(job, last)
            if not finished:
                self._stopped.wait(_POLL)
        if last.get("event") == "error":
            raise UserError(f"On {node}: {last['headline']}", last["problems"], last["hint"])
        self._fetch(actor, job, report, out)
        return {name: last[name] for name in ("key", "cached", "plan")}

    def _fetch(self, actor: Any, job: BuildJob, report: Report, out: Path) -> None:
        """Copy the engine; each file is compared with the digests of the node and of the engine's manifest."""
        files = self._get(actor.files.remote())
        report(job, {"event": "phase", "what": "fetching", "total": sum(size for size, _ in files.values())})
        done = 0
        with publish(out) as directory:
            for name, (size, digest) in files.items():
                path = directory / _relative(name)
                path.parent.mkdir(parents=True, exist_ok=True)
                found, offset = hashlib.sha256(), 0
                with open(path, "wb") as file:
                    while offset < size:
                        piece = self._get(actor.read.remote(name, offset))
                        if not piece:
                            raise BundleError(f"{name} of {job.name} became shorter on its node.")
                        file.write(piece)
                        found.update(piece)
                        offset, done = offset + len(piece), done + len(piece)
                        report(job, {"event": "done", "bytes": done})
                if found.hexdigest() != digest:
                    raise BundleError(f"{name} of {job.name} was damaged on its way (sha256 differs).")
            _check_manifest(directory, {name: digest for name, (_, digest) in files.items()})

    def _get(self, reference: Any) -> Any:
        """Wait for a result, but not when stopped."""
        while not self._stopped.is_set():
            ready, _ = self._ray.wait([reference], timeout=_POLL)
            if ready:
                return self._ray.get(reference)
        raise UserError("The build was interrupted.")

    def _end(self, actor: Any) -> None:
        with suppress(Exception):  # it is gone, or never got a node
            self._ray.get(actor.close.remote(), timeout=10)
        self._ray.kill(actor)


def _relative(name: str) -> PurePosixPath:
    """A file's name in the engine, which must not lead out of it."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise BundleError(f"A node sent a file {name!r}, which is no file of an engine.")
    return path


def _check_manifest(directory: Path, digests: Mapping[str, str]) -> None:
    """Raise BundleError if files are not those that the engine's manifest describes."""
    if not is_bundle(directory):
        raise BundleError("A node sent no engine.")
    manifest = read_manifest(directory, ENGINE_BUNDLE)
    graphs = {g["file"]: g["sha256"] for g in manifest["graphs"].values()}
    described = {**manifest["files"], **graphs, **manifest["weights"]["files"]}
    wrong = sorted(name for name, digest in described.items() if digests.get(name) != digest)
    if wrong:
        raise BundleError("A node sent files that its manifest does not describe:", wrong)
