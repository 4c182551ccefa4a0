# SPDX-License-Identifier: Apache-2.0
"""What a client asks for: from tensors, of whichever of the known dialects, to the runtime's parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nemo_build.errors import RequestError
from nemo_build.runtime.params import SamplingParams
from nemo_build.runtime.request import Scheduling
from nemo_build.triton_repo.arrays import Tensors
from nemo_build.triton_repo.front_tensors import INPUTS

_NAMES = {
    "min_length": "min_tokens",
    "random_seed": "seed",
    "stop_words": "stop",
    "end_id": "stop_token_ids",
}
"""What inputs are called that are parameters of sampling under another name."""

_PARAMETERS = {f.name for f in fields(SamplingParams)}

_KNOWN = _PARAMETERS | {spec.name for spec in INPUTS}

_ONLY = {
    "num_return_sequences": 1,
    "beam_width": 1,
    "return_perf_metrics": False,
    "length_penalty": 1,
    "bad_words": "",
}
"""Inputs that may be sent, but only with the value that changes nothing."""

_ONLY_IN_JSON: Mapping[str, Any] = {"n": 1, "best_of": 1, "use_beam_search": False, "length_penalty": 1}
"""The same of members of ``sampling_parameters``, as clients of vLLM's model send them."""

_LISTS = ("stop", "stop_token_ids")

_GUIDES = {"json": "json_object", "json_schema": "json_schema", "regex": "regex"}
"""Kinds of grammars by the name that TensorRT-LLM's model has for them (``guided_decoding_guide_type``)."""

_MOST_JSON = 1 << 20
"""Bytes of ``sampling_parameters``."""

_MOST_STOPS = 64
"""Stop words, and stop tokens, of a request: each costs time with every token."""


@dataclass(frozen=True)
class Asked:
    """What a client asks for.

    Attributes:
        prompt: A text, or token ids.
        params: How tokens are chosen.
        scheduling: Priority, timeout and the like.
        streams: Whether each piece of text is to be sent as it comes.
        echoes: Whether the prompt is to be part of the text.
        skips_special: Whether control tokens are left out of the text.
        shows_details: Whether responses say which tokens they are of, and more of how the text came about.
        shows_probabilities: Whether responses have the tokens' log probabilities as plain numbers.
    """

    prompt: str | list[int]
    params: SamplingParams
    scheduling: Scheduling
    streams: bool
    echoes: bool
    skips_special: bool
    shows_details: bool
    shows_probabilities: bool


def wants_report(inputs: Tensors) -> bool:
    """Whether a client asks about the server, and for no text."""
    return "report" in inputs and bool(inputs["report"].all())


def parse(inputs: Tensors, defaults: SamplingParams) -> Asked:
    """A client's inputs.

    Args:
        inputs: By name.
        defaults: Parameters for what it does not say.

    Raises:
        RequestError: What is wrong with them; all problems are named.
    """
    problems: list[str] = []
    values = {name: _value(name, array, problems) for name, array in inputs.items()}
    unknown = sorted(values.keys() - _KNOWN)
    if unknown:
        problems.append(f"there are no inputs of the names {', '.join(map(repr, unknown))}")
    prompt = _prompt(values, problems)
    problems += _unmet(values, _ONLY)
    chosen = _chosen(values, defaults, problems)
    if problems:
        raise RequestError("The request cannot be answered:", problems)
    return Asked(
        prompt,
        SamplingParams(**chosen),
        Scheduling(
            priority=values.get("priority", 0),
            timeout=values.get("timeout"),
            salt=values.get("salt") or None,
            speculate=bool(values.get("speculate", True)),
        ),
        bool(values.get("stream", values.get("streaming", False))),
        not values.get("exclude_input_in_output", True),
        bool(values.get("skip_special_tokens", True)),
        bool(values.get("return_details", False)),
        bool(values.get("return_log_probs", False)),
    )


def _chosen(values: Mapping[str, Any], defaults: SamplingParams, problems: list[str]) -> dict[str, Any]:
    """Parameters of sampling; those that have an input of their own come before those of the JSON."""
    chosen = {n: getattr(defaults, n) for n in _PARAMETERS}
    chosen |= _from_json(values.get("sampling_parameters", ""), problems)
    for name, value in values.items():
        parameter = _NAMES.get(name, name)
        if parameter in _PARAMETERS:
            chosen[parameter] = _without_empty(_as_list(value)) if parameter in _LISTS else value
    chosen |= _guide(values, problems)
    if values.get("return_log_probs") or values.get("return_logprobs"):
        chosen["logprobs"] = chosen["logprobs"] or 0
    problems += [
        f"there are {len(chosen[n])} {n}; at most {_MOST_STOPS} are taken"
        for n in _LISTS
        if len(chosen[n]) > _MOST_STOPS
    ]
    least, most = chosen["min_tokens"], chosen["max_tokens"]
    if isinstance(least, int) and isinstance(most, int):
        chosen["min_tokens"] = min(least, most)
    return chosen


def _prompt(values: Mapping[str, Any], problems: list[str]) -> str | list[int]:
    """The prompt, which is given in one of two ways."""
    text, ids = values.get("text_input"), values.get("input_ids")
    if (text is None) == (ids is None):
        problems.append("a prompt is either text_input or input_ids: one of them must be given")
    elif ids is not None:
        ids = _as_list(ids)
        if all(type(i) is int for i in ids):
            return ids
        problems.append("input_ids are no integers")
    elif isinstance(text, str):
        return text
    else:
        problems.append("text_input is no text")
    return ""


def _guide(values: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A grammar as clients of TensorRT-LLM's model ask for it."""
    kind = values.get("guided_decoding_guide_type") or ""
    guide = values.get("guided_decoding_guide") or ""
    if not (kind or guide):
        return {}
    if kind not in _GUIDES:
        known = ", ".join(_GUIDES)
        problems.append(f"guided_decoding_guide_type is {kind!r}; this server knows only {known}")
        return {}
    return {"grammar": {"kind": _GUIDES[kind], "text": guide}}


def _value(name: str, array: NDArray[Any], problems: list[str]) -> Any:
    """An input as Python has it: a value, or a list of several."""
    values = array.ravel().tolist()
    if array.dtype == np.float32:
        values = [float(str(v)) for v in array.ravel()]  # 0.7 as somebody wrote it, not 0.699999988
    try:
        values = [v.decode() if isinstance(v, bytes) else v for v in values]
    except UnicodeDecodeError as error:
        problems.append(f"{name} is not UTF-8: byte {error.start} cannot be decoded")
        return ""
    return values[0] if len(values) == 1 else values


def _as_list(value: Any) -> list[Any]:
    """Several values, of which one is taken for a list."""
    return value if isinstance(value, list) else [value]


def _without_empty(values: list[Any]) -> list[Any]:
    """Stop words or ids; empty ones are how some clients say that there are none."""
    return [v for v in values if v not in ("", -1)]


def _unmet(values: Mapping[str, Any], only: Mapping[str, Any]) -> list[str]:
    """What is asked for that is not done here."""
    return [
        f"{name} is {values[name]!r}; this server knows only {value!r}"
        for name, value in only.items()
        if name in values and values[name] not in (value, [value], [])
    ]


def _from_json(text: Any, problems: list[str]) -> dict[str, Any]:
    """Sampling parameters as one JSON object, which is how clients of vLLM's model send them."""
    if not text:
        return {}
    if not isinstance(text, str):
        problems.append("sampling_parameters is no text")
        return {}
    if len(text) > _MOST_JSON:
        problems.append(f"sampling_parameters has {len(text)} characters; at most {_MOST_JSON} are taken")
        return {}
    try:
        given: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.append(f"sampling_parameters is no JSON: {error}")
        return {}
    if not isinstance(given, Mapping):
        problems.append("sampling_parameters is not a JSON object")
        return {}
    values = {n: v if n in _LISTS else _number(v) for n, v in given.items()}
    problems += _unmet(values, _ONLY_IN_JSON)
    unknown = sorted(set(given) - _PARAMETERS - set(_ONLY_IN_JSON))
    if unknown:
        problems.append(f"sampling_parameters has unknown names: {', '.join(map(repr, unknown))}")
    values = {n: v for n, v in values.items() if n in _PARAMETERS}
    if isinstance(values.get("logit_bias"), Mapping):
        values["logit_bias"] = {_number(k): v for k, v in values["logit_bias"].items()}
    return values | {n: _without_empty(_as_list(values[n])) for n in _LISTS if n in values}


def _number(value: Any) -> Any:
    """A number or a truth value that was sent as a string, as some clients do."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, (bool, int, float)) else value
