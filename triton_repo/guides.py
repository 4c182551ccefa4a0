# SPDX-License-Identifier: Apache-2.0
"""What texts have to obey, in each process that chooses tokens.

Each has constraints of its own, which follow the tokens there: logits are in one process, drafts in another. To compile
a grammar may take seconds, which a step must not wait for. So before a request begins, every process is asked to
prepare, which it does beside its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nemo_build.runtime.constraints.base import Guide
from nemo_build.runtime.constraints.making import Constraints
from nemo_build.runtime.params import SamplingParams


class Guides:
    """Makes what requests obey in this process.

    Args:
        open_constraints: Opens what makes it. Called with the first request that has something to obey.
    """

    def __init__(self, open_constraints: Callable[[], Constraints]) -> None:
        self._open = open_constraints
        self._constraints: Constraints | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._preparing: dict[str, Future[Any]] = {}

    def guide(self, params: SamplingParams) -> Guide | None:
        """What the tokens of a request obey, from its beginning; ``None``: nothing. Errors are those of
        :meth:`~nemo_build.runtime.constraints.making.Constraints.guide`.
        """
        if params.grammar is None and params.thinking is None:
            return None
        if self._constraints is None:
            self._constraints = self._open()
        return self._constraints.guide(params)

    def prepare(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Get ready for requests with a grammar, beside everything else.

        Args:
            order: The ``grammar``.

        Returns:
            ``ready``: whether it is done; ``problem``: what it failed with.
        """
        params = SamplingParams(grammar=order["grammar"])
        key = repr(params.grammar)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "grammar")
        future = self._preparing.get(key)
        if future is None:
            future = self._preparing[key] = self._pool.submit(self.guide, params)
        if not future.done():
            return {"ready": False}
        del self._preparing[key]
        problem = future.exception()
        return {"ready": True, "problem": None if problem is None else str(problem)}
