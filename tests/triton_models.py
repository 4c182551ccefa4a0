# SPDX-License-Identifier: Apache-2.0
"""The models of a step in this process, called as Triton calls them: by name, ensembles from one model to the next."""

from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import NDArray

from nemo_build.triton_repo.arrays import Tensors
from nemo_build.triton_repo.opening import Parts
from nemo_build.triton_repo.remote import StepsFailedError
from nemo_build.triton_repo.stages import Accept, Draft, Verify, answer
from nemo_build.triton_repo.tensors import ensemble, step_models


class LocalModels:
    """Reaches models in this process.

    Args:
        parts: What they are made of.
        before: Called with a model's name before it runs; may raise StepsFailedError.

    Attributes:
        repairs: How often they were started again.
        calls: Names of the models that were called from outside, in order.
    """

    def __init__(self, parts: Parts, before: Callable[[str], None] = lambda _: None) -> None:
        self._parts, self._before = parts, before
        self.repairs = 0
        self.calls: list[str] = []
        self._start()

    def call(self, model: str, inputs: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
        self.calls.append(model)
        specs = {spec.name: spec for spec in (ensemble(None), ensemble(self._parts.drafter))}
        given = dict(inputs)
        if model not in specs:
            given |= self._run(model, given)
        else:
            for step in specs[model].models:
                taken = {spec.name: given[spec.name] for spec in step.inputs}
                for spec in step.inputs:
                    assert given[spec.name].ndim == len(spec.dims), spec.name
                    assert given[spec.name].size, f"{spec.name} is empty, which not every server takes"
                given |= self._run(step.name, taken)
        return {name: given[name] for name in outputs}

    def repair(self) -> None:
        self.repairs += 1
        self._start()

    def _start(self) -> None:
        drafter = self._parts.drafter
        self._stages: dict[str, Verify | Draft | Accept] = {
            "verify": self._parts.verify(),
            "accept": Accept(),
        }
        if drafter is not None:
            self._stages[f"draft_{drafter}"] = self._parts.draft()
        assert {m.name for m in step_models(drafter)} <= set(self._stages)

    def _run(self, model: str, inputs: Tensors) -> dict[str, NDArray[Any]]:
        self._before(model)
        return answer(self._stages[model], inputs)


__all__ = ["LocalModels", "StepsFailedError"]
