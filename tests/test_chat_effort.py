# SPDX-License-Identifier: Apache-2.0
"""How much a model is to think, in the words of its template."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_build.demo import CHECKPOINT
from nemo_build.errors import RequestError
from nemo_build.runtime.chat import EFFORTS, ChatTemplate, template_variables

PLAIN = ChatTemplate("{{ messages }}")
LOW = ChatTemplate("{{ low_effort }}")  # as Nemotron 3 Super's
MEDIUM = ChatTemplate("{% if medium_effort is defined and medium_effort %}!{% endif %}")  # as Ultra's
BOTH = ChatTemplate("{{ low_effort }}{{ medium_effort }}")
OWN = ChatTemplate({"default": "", "tool_use": "{{ reasoning_effort }}"})


@pytest.mark.parametrize("template", [PLAIN, LOW, MEDIUM, BOTH, ChatTemplate.load(CHECKPOINT)])
def test_none_is_no_thinking(template: ChatTemplate) -> None:
    assert template_variables(template, reasoning_effort="none") == {"enable_thinking": False}


@pytest.mark.parametrize("effort", [e for e in EFFORTS if e != "none"])
def test_a_template_without_switches(effort: str) -> None:
    assert template_variables(PLAIN, reasoning_effort=effort) == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("template", "effort", "switch"),
    [
        (LOW, "minimal", {"low_effort": True}),
        (LOW, "low", {"low_effort": True}),
        (LOW, "medium", {}),
        (MEDIUM, "low", {"medium_effort": True}),
        (MEDIUM, "medium", {"medium_effort": True}),
        (BOTH, "low", {"low_effort": True}),
        (BOTH, "medium", {"medium_effort": True}),
        (BOTH, "high", {}),
        (OWN, "medium", {"reasoning_effort": "medium"}),
        (OWN, "high", {"reasoning_effort": "high"}),
    ],
)
def test_switches(template: ChatTemplate, effort: str, switch: dict[str, Any]) -> None:
    assert template_variables(template, reasoning_effort=effort) == {"enable_thinking": True} | switch


def test_what_is_said_more_exactly_goes_first() -> None:
    def variables(**options: Any) -> dict[str, Any]:
        return template_variables(BOTH, **options)

    assert variables() == {}
    assert variables(enable_thinking=False) == {"enable_thinking": False}
    assert variables(enable_thinking=True, reasoning_effort="none") == {"enable_thinking": True}
    assert variables(enable_thinking=False, reasoning_effort="low") == {"enable_thinking": False}
    own = {"enable_thinking": True, "low_effort": False, "other": 5}
    assert variables(enable_thinking=False, reasoning_effort="low", chat_template_kwargs=own) == own
    assert own == {"enable_thinking": True, "low_effort": False, "other": 5}


def test_what_is_wrong() -> None:
    with pytest.raises(RequestError) as caught:
        template_variables(PLAIN, reasoning_effort="lots", chat_template_kwargs=[1])  # type: ignore[arg-type]
    assert len(caught.value.problems) == 2
    with pytest.raises(RequestError):
        template_variables(PLAIN, reasoning_effort=["low"])  # type: ignore[arg-type]


def test_variables_of_a_template() -> None:
    assert {"enable_thinking", "messages", "tools"} <= ChatTemplate.load(CHECKPOINT).variables
    assert "medium_effort" not in ChatTemplate.load(CHECKPOINT).variables
    assert OWN.variables == {"reasoning_effort"}
