# SPDX-License-Identifier: Apache-2.0
"""Conversations to prompts, and answers to their parts.

``template`` renders messages to the text of a prompt. ``answer`` takes the text of an answer apart, while it comes,
into reasoning, content and tool calls.
"""

from nemo_build.runtime.chat.answer import AnswerParser, opens_thinking
from nemo_build.runtime.chat.deltas import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from nemo_build.runtime.chat.effort import EFFORTS, template_variables
from nemo_build.runtime.chat.template import ROLES, ChatTemplate

__all__ = [
    "EFFORTS",
    "ROLES",
    "AnswerParser",
    "ChatTemplate",
    "Content",
    "Delta",
    "Reasoning",
    "ToolCallArguments",
    "ToolCallStart",
    "opens_thinking",
    "template_variables",
]
