# SPDX-License-Identifier: Apache-2.0
"""Triton's Python objects as names and arrays, and back."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from numpy.typing import NDArray

from nemo_build.errors import UserError
from nemo_build.triton_repo.arrays import Tensors
from nemo_build.triton_repo.settings import RepositorySettings

FAILED = "the model failed: "
"""How messages of errors begin that a model of ours answers with, rather than the server for it."""


def settings_of(arguments: Mapping[str, str]) -> tuple[RepositorySettings, Path]:
    """The settings of a version of a model, and that version's folder."""
    folder = Path(arguments["model_repository"]) / arguments["model_version"]
    return RepositorySettings.load(folder), folder


def read(request: Any) -> dict[str, NDArray[Any]]:
    """The inputs of a request."""
    return {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}


def tensors(outputs: Tensors) -> list[Any]:
    """Arrays as tensors."""
    return [pb_utils.Tensor(name, array) for name, array in outputs.items()]


def answer_all(requests: Iterable[Any], run: Callable[[dict[str, NDArray[Any]]], Tensors]) -> list[Any]:
    """Responses to requests, in order; one that fails gets its error."""
    responses = []
    for request in requests:
        wanted = set(request.requested_output_names())
        try:
            found = run(read(request))
        except UserError as error:
            responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{FAILED}{error}")))
        except Exception as error:  # the server's log says where; whoever asked, what
            traceback.print_exc()
            message = f"{FAILED}{type(error).__name__}: {error}"
            responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(message)))
        else:
            responses.append(
                pb_utils.InferenceResponse(tensors({n: a for n, a in found.items() if n in wanted}))
            )
    return responses


def call(model: str, inputs: Tensors, outputs: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Run another model of this server.

    Raises:
        RuntimeError: It fails.
    """
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(outputs), inputs=tensors(inputs)
    )
    response = request.exec()
    if response.has_error():
        raise RuntimeError(f"{model}: {response.error().message()}")
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
