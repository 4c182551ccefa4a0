# SPDX-License-Identifier: Apache-2.0
"""How much a model is to think, as OpenAI's clients say it, in the words of a checkpoint's template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_build.errors import RequestError
from nemo_build.runtime.chat.template import ChatTemplate

__all__ = ["EFFORTS", "template_variables"]

EFFORTS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "minimal": ("low_effort", "medium_effort"),
    "low": ("low_effort", "medium_effort"),
    "medium": ("medium_effort",),
    "high": (),
    "xhigh": (),
    "max": (),
}
"""Efforts, and the switches of templates that stand for them: the first one that a template reads is set.

From ``high`` on a model thinks as it does without a switch. ``none`` is no thinking at all.
"""


def template_variables(
    template: ChatTemplate,
    *,
    enable_thinking: bool | None = None,
    reasoning_effort: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The variables for :meth:`ChatTemplate.render` that follow from a request.

    What is said more exactly goes first: ``chat_template_kwargs``, then ``enable_thinking``, then
    ``reasoning_effort``. ``none`` means ``enable_thinking=False``, any other effort ``enable_thinking=True``. An effort
    also sets the first of its switches (:data:`EFFORTS`) that the template reads, and ``reasoning_effort`` if it reads
    that; a template that reads neither thinks as ever. Without thinking no switch is set.

    Raises:
        RequestError: An effort that is none of :data:`EFFORTS`, or variables that are no object.
    """
    problems = []
    if not (reasoning_effort is None or (isinstance(reasoning_effort, str) and reasoning_effort in EFFORTS)):
        problems.append(f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {reasoning_effort!r}")
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        problems.append(f"chat_template_kwargs must be an object, got {chat_template_kwargs!r}")
    if problems:
        raise RequestError("The request's reasoning options are invalid.", problems)
    given = dict(chat_template_kwargs or {})
    if enable_thinking is None and reasoning_effort is not None:
        enable_thinking = reasoning_effort != "none"
    if enable_thinking is not None:
        given.setdefault("enable_thinking", enable_thinking)
    if reasoning_effort is None or not given.get("enable_thinking"):
        return given
    switch = next((name for name in EFFORTS[reasoning_effort] if name in template.variables), None)
    if switch is not None:
        given.setdefault(switch, True)
    if "reasoning_effort" in template.variables:
        given.setdefault("reasoning_effort", reasoning_effort)
    return given
