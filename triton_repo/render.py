# SPDX-License-Identifier: Apache-2.0
"""Rendering of a model repository from an engine."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from nemo_build.bundle import ENGINE_BUNDLE, publish, read_manifest, require_output, sha256_json
from nemo_build.engines.backends import runs_on_host
from nemo_build.engines.provenance import check_engine
from nemo_build.errors import RequestError, UserError
from nemo_build.runtime.opening import Options
from nemo_build.runtime.speculation.kinds import SPECULATORS, speculator_kind
from nemo_build.triton_repo import FRONT, front_tensors
from nemo_build.triton_repo.config import ensemble_config, front_config, stage_config
from nemo_build.triton_repo.settings import RepositorySettings
from nemo_build.triton_repo.tensors import ensemble, step_models, with_control

_ENGINE = "engine"
_SOURCE = """\
# Written by nemo-build; the model's code is in the package, its settings are in the file beside this one.
from nemo_build.triton_repo.models.{module} import TritonPythonModel  # noqa: F401
"""


@dataclass(frozen=True)
class Rendered:
    """A repository, the version of ``generate`` that was written, and the models that belong to it."""

    repository: Path
    version: int
    models: tuple[str, ...]


def render(
    engine: Path,
    repository: Path,
    options: Options | None = None,
    *,
    in_process: bool = False,
    reference: bool = False,
    most_waiting: int = 256,
    force: bool = False,
) -> Rendered:
    """Write a repository with one version of an engine.

    Args:
        engine: The engine.
        repository: The directory to write.
        options: How the engine is opened; sampled drafts are coupled whatever they say.
        in_process: One model only, which opens the engine itself: no models for steps.
        reference: Refer to the engine where it is, rather than putting it into the repository (by hard links, or
            copies on another file system).
        most_waiting: Requests that may wait; further ones are refused.
        force: Replace `repository` if it is one.

    Raises:
        BundleError: It is no engine, or a damaged one.
        RequestError: The engine does not have what is asked for.
        UserError: `repository` exists.
    """
    require_output(repository, force=force, source=engine, ours=is_repository)
    resolved = _resolved(engine, options or Options(), in_process)
    parts = _Version(engine, resolved, 1, in_process, most_waiting)
    with publish(repository) as folder:
        parts.write(folder, reference=reference)
    return Rendered(repository, 1, tuple(parts.names.values()))


def add_version(
    engine: Path,
    repository: Path,
    options: Options | None = None,
    *,
    in_process: bool = False,
    reference: bool = False,
    most_waiting: int = 256,
) -> Rendered:
    """Add another engine, or the same with other options, as the next version of ``generate``.

    Its steps are models of their own, so a server goes on with the version before until it is told to load this one,
    and answers what was asked of that one to the end. Arguments and errors are those of :func:`render`.
    """
    version = 1 + max(versions(repository))
    resolved = _resolved(engine, options or Options(), in_process)
    parts = _Version(engine, resolved, version, in_process, most_waiting)
    # What a server looks at last is moved in last: the version of the front.
    with ExitStack() as stack:
        holder = repository.parent / f".{repository.name}.v{version}"
        # Left behind by a command that was killed before its version was there.
        for path in (holder, *(repository / name for name in parts.names.values())):
            shutil.rmtree(path, ignore_errors=True)
        stack.callback(shutil.rmtree, holder, ignore_errors=True)
        holder.mkdir()
        parts.write(holder, reference=reference)
        for name in parts.names.values():
            os.rename(holder / name, repository / name)
        os.rename(holder / FRONT / str(version), repository / FRONT / str(version))
    return Rendered(repository, version, tuple(parts.names.values()))


def is_repository(directory: Path) -> bool:
    """Whether a directory is what :func:`render` writes."""
    return any(directory.glob(f"{FRONT}/*/settings.json"))


def versions(repository: Path) -> dict[int, RepositorySettings]:
    """The settings of ``generate`` by version. Raises UserError if it is no repository of this command."""
    if not is_repository(repository):
        raise UserError(f"{repository} is not a repository that this command has written.")
    folders = [p for p in (repository / FRONT).iterdir() if p.name.isdecimal()]
    return {int(p.name): RepositorySettings.load(p) for p in folders}


@dataclass(frozen=True)
class _Version:
    """One version of an engine in a repository."""

    engine: Path
    options: Options
    number: int
    in_process: bool
    most_waiting: int

    @property
    def drafter(self) -> str | None:
        return None if self.options.speculate == "none" else self.options.speculate

    @property
    def names(self) -> dict[str, str]:
        """What models of a step are called in the repository, in the order in which they can be loaded."""
        if self.in_process:
            return {}
        suffix = "" if self.number == 1 else f"_v{self.number}"
        drafters = [None] if self.drafter is None else [None, self.drafter]
        models = [m.name for m in step_models(self.drafter)] + [ensemble(d).name for d in drafters]
        return {name: f"{name}{suffix}" for name in models}

    def write(self, folder: Path, *, reference: bool) -> None:
        """Write the models into a folder."""
        version = folder / FRONT / str(self.number)
        version.mkdir(parents=True)
        place = str(self.engine.resolve())
        if not reference:
            shutil.copytree(self.engine, version / _ENGINE, copy_function=_link)
            place = f"../../{FRONT}/{self.number}/{_ENGINE}"
        settings = RepositorySettings(
            FRONT,
            place,
            f"{self.number}-{sha256_json([place, asdict(self.options)])[:8]}",
            asdict(self.options),
            self.names,
            self.in_process,
            self.most_waiting,
        )
        config = front_config(FRONT, front_tensors.INPUTS, front_tensors.OUTPUTS)
        (folder / FRONT / "config.pbtxt").write_text(config)
        _write_source(version, "generate", settings)
        if not self.in_process:
            self._write_steps(folder, settings)

    def _write_steps(self, folder: Path, settings: RepositorySettings) -> None:
        names = self.names
        for spec in map(with_control, step_models(self.drafter)):
            model = folder / names[spec.name]
            (model / "1").mkdir(parents=True)
            (model / "config.pbtxt").write_text(stage_config(model.name, spec.inputs, spec.outputs))
            _write_source(model / "1", "stage", replace(settings, role=spec.name.split("_")[0]))
        for drafter in [None] if self.drafter is None else [None, self.drafter]:
            step = ensemble(drafter)
            model = folder / names[step.name]
            (model / "1").mkdir(parents=True)
            (model / "config.pbtxt").write_text(ensemble_config(step, model.name, names))


def _resolved(engine: Path, options: Options, in_process: bool) -> Options:
    """The options with the speculator's own name; raises an error if the engine cannot be served with them."""
    options.check()
    manifest = read_manifest(engine, ENGINE_BUNDLE)
    check_engine(engine, manifest)
    if not (in_process or runs_on_host(engine, manifest)):
        raise RequestError(
            f"{engine} runs on a GPU, where its state is in the memory of one process.",
            hint="Render it with --in-process: one model that holds the whole engine.",
        )
    kind = speculator_kind(options.speculate, options.draft_length, manifest["graphs"])
    name = next((n for n, k in SPECULATORS.items() if k is kind), "none")
    return replace(options, speculate=name, drafting="coupled")


def _write_source(folder: Path, module: str, settings: RepositorySettings) -> None:
    (folder / "model.py").write_text(_SOURCE.format(module=module))
    settings.save(folder)


def _link(source: str, destination: str) -> None:
    """A hard link, or a copy where that cannot be."""
    try:
        os.link(source, destination)
    except OSError:
        shutil.copy2(source, destination)
