# SPDX-License-Identifier: Apache-2.0
"""The errors a user can mend.

Everything that is wrong with the user's input is raised as a :class:`UserError` (or a subclass). It carries
*all* problems of its kind at once; the command line prints it without a traceback and exits with 1. Any
other exception is a defect of nemo-build.
"""

from __future__ import annotations

from collections.abc import Iterable


class UserError(Exception):
    """Bad input: one headline, every problem found, and how to mend it.

    Args:
        headline: What could not be done, and with which file or directory.
        problems: Each problem found, one line each ("what was found, where").
        hint: How to mend it; empty if the problems say so themselves.
    """

    def __init__(self, headline: str, problems: Iterable[str] = (), hint: str = "") -> None:
        self.headline = headline
        self.problems = tuple(problems)
        self.hint = hint
        super().__init__(headline, self.problems, hint)

    def __str__(self) -> str:
        lines = [self.headline, *(f"  - {p}" for p in self.problems)]
        if self.hint:
            lines.append(self.hint)
        return "\n".join(lines)


class ConfigError(UserError):
    """``config.json`` (or ``generation_config.json``) cannot be honoured as it stands."""


class CheckpointError(UserError):
    """The checkpoint's tensors do not match what its configuration needs."""


class BundleError(UserError):
    """A model bundle or an engine bundle is missing, damaged, or of another version."""


class PlanError(UserError):
    """The engine cannot fit the memory it is asked to run in."""


class RequestError(UserError):
    """A generation request is invalid (too long, contradictory or out-of-range parameters)."""
