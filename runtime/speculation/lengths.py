# SPDX-License-Identifier: Apache-2.0
"""How many tokens to draft: learnt from what steps cost and which drafts are accepted.

With a_i the probability that draft i is accepted after those before it were, K drafts give
``E(K) = 1 + sum_{j <= K} prod_{i <= j} a_i`` tokens (Leviathan et al., arXiv 2211.17192, section 3.1). The best K
maximises ``E(K) / cost(K)``; 0 is plain decoding. Costs belong to an engine and acceptance to a kind of text, so
:class:`CostTable` objects may be shared by controllers.

There is no clock and no chance in here: durations are passed in, and the same calls give the same lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["AcceptanceModel", "CostTable", "DraftLengthController"]

_LOWER_WEIGHT, _HIGHER_WEIGHT = 0.3, 0.05
"""Weight of a new duration in a cell's moving average. A width that is run now and then takes longer than it would
every time, because what it needs is in no cache any more."""

_PRIOR_RATE, _PRIOR_WEIGHT = 0.7, 2.0
"""Acceptance assumed of the first draft before any is seen, and how many observations that counts for."""

_DECAY, _PROBE_DECAY = 0.98, 0.9
"""What a step leaves of earlier observations of acceptance. Probes, being rare, count for more."""

_DECISION_INTERVAL = 4
"""Steps for which a decision holds, unless a cost is measured for the first time."""

_PLAIN_STEPS = 12
"""Plain steps before the first draft: the first ones of a process, or of so many rows, take longer than the rest."""

_LEAST_GAIN = 0.1
"""What drafts must promise over plain decoding to be made at all: what is not sure to gain is not to lose."""

_PROBE_STEPS = 2
"""Steps of a probe from 0: in the first the drafter takes in what it has not seen meanwhile, which is no usual cost."""

_PROBE_INTERVAL = 16
"""Fewest steps from one probe to the next."""

_MOST_STEPS_IN_DEBT = 512
"""The credit for probes stays within what so many steps earn, or what as many owe for each step of a probe."""


class CostTable:
    """Seconds of a step by its rows and by the tokens of each row, from measurements.

    A cell is a moving average. It learns lower durations at once and higher ones slowly, since disturbances only
    ever add; the first duration of a cell is ignored, because it may include allocation or compilation.

    What was not measured is estimated, rather too low than too high, so that it is tried once: between two
    widths measured for as many rows, half as far above the lower as a straight line (kernels have steps);
    otherwise from a non-decreasing curve of seconds by total tokens through all cells, scaled to the nearest
    width measured for as many rows. Beyond the last cell the curve goes on as between the last two, beyond an
    only cell it is flat.

    Args:
        free_at_zero: A width of 0 costs nothing (a drafter that is not run).
    """

    def __init__(self, *, free_at_zero: bool = False) -> None:
        self._free_at_zero = free_at_zero
        self._cells: dict[int, dict[int, float]] = {}  # bucket of rows -> width -> seconds
        self._times: dict[tuple[int, int], int] = {}  # durations of each cell, the ignored first one included
        self._curve: tuple[list[float], list[float]] | None = None

    @staticmethod
    def bucket(rows: int) -> int:
        """Rows of the cells that stand for ``rows``: its two leading bits (1, 2, 3, 4, 6, 8, 12, 16, ...)."""
        shift = max(rows.bit_length() - 2, 0)
        return rows >> shift << shift

    def observe(self, rows: int, width: int, seconds: float, *, usual: bool = True) -> None:
        """Learn how long a step took.

        Args:
            rows: Rows of the step, >= 1.
            width: Tokens of each row (the most of any row), >= 1.
            seconds: Its duration, finite and >= 0.
            usual: Whether it did no more than such steps do; if it did, only the next duration counts.

        Raises:
            ValueError: An argument is out of range.
        """
        if rows < 1 or width < 1 or not 0 <= seconds < float("inf"):
            raise ValueError(f"a step of {rows} rows and width {width} cannot take {seconds} s")
        key = (self.bucket(rows), width)
        self._times[key] = self._times.get(key, 0) + usual
        if self._times[key] < 2:
            self._times[key] = 1
            return
        if not usual:
            return
        cells = self._cells.setdefault(key[0], {})
        old = cells.get(width)
        if old is None or seconds < old / 2:
            cells[width] = max(seconds, 1e-9)
        else:
            weight = _LOWER_WEIGHT if seconds < old else _HIGHER_WEIGHT
            cells[width] = old + weight * (min(seconds, 2 * old) - old)
        self._curve = None

    def is_measured(self, rows: int, width: int, times: int = 1) -> bool:
        """Whether the cell for this has so many durations."""
        return self._times.get((self.bucket(rows), width), 0) > times

    def is_known(self, rows: int) -> bool:
        """Whether there is any cell for so many rows."""
        return self.bucket(rows) in self._cells

    def estimate(self, rows: int, width: int) -> float:
        """Seconds of a step; 0 if nothing is known at all."""
        if width == 0 and self._free_at_zero:
            return 0.0
        rows = self.bucket(rows)
        cells = self._cells.get(rows, {})
        if width in cells:
            return cells[width]
        lower = max((w for w in cells if w < width), default=None)
        upper = min((w for w in cells if w > width), default=None)
        if upper is not None and (lower is not None or self._free_at_zero):
            start, low = (lower, cells[lower]) if lower is not None else (0, 0.0)
            return low + max(cells[upper] - low, 0.0) / 2 * (width - start) / (upper - start)
        near = lower if lower is not None else upper
        if near is None:
            return self._by_tokens(rows * width)
        return cells[near] * self._by_tokens(rows * width) / self._by_tokens(rows * near)

    def _by_tokens(self, tokens: int) -> float:
        """The curve of seconds by total tokens."""
        if self._curve is None:
            self._curve = self._make_curve()
        xs, ys = self._curve
        if not xs:
            return 0.0
        if tokens > xs[-1] and len(xs) > 1:
            slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
            return ys[-1] + slope * (tokens - xs[-1])
        return float(np.interp(tokens, xs, ys))

    def _make_curve(self) -> tuple[list[float], list[float]]:
        points: dict[float, list[float]] = {}
        for rows, cells in self._cells.items():
            for width, seconds in cells.items():
                points.setdefault(float(rows * width), []).append(seconds)
        xs = sorted(points)
        ys = _non_decreasing([sum(points[x]) / len(points[x]) for x in xs])
        return ([0.0, *xs], [0.0, *ys]) if xs and self._free_at_zero else (xs, ys)


def _non_decreasing(values: Sequence[float]) -> list[float]:
    """The non-decreasing sequence nearest to ``values`` in least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, size = value, 1
        while pools and pools[-1][0] > mean:
            other, count = pools.pop()
            mean = (mean * size + other * count) / (size + count)
            size += count
        pools.append((mean, size))
    return [mean for mean, size in pools for _ in range(size)]


class AcceptanceModel:
    """The probability of each draft to be accepted after those before it were.

    Counts that decay. A draft's estimate starts from that of the draft before it, so that depths which were
    not tried of late follow those which were.

    Args:
        max_length: Most drafts of a step.
    """

    def __init__(self, max_length: int) -> None:
        self._tried = np.zeros(max_length)
        self._accepted = np.zeros(max_length)

    def observe(self, results: Sequence[tuple[int, int]], decay: float) -> None:
        """Learn from one step.

        Args:
            results: For each row how many tokens were drafted and how many of them accepted.
            decay: What remains of earlier observations.
        """
        self._tried *= decay
        self._accepted *= decay
        for drafted, accepted in results:
            self._tried[: min(drafted, accepted + 1)] += 1
            self._accepted[:accepted] += 1

    def rates(self) -> NDArray[np.float64]:
        """``[max_length]``, each in [0, 1]."""
        rates = np.empty(len(self._tried))
        rate = _PRIOR_RATE
        for i, (tried, accepted) in enumerate(zip(self._tried, self._accepted, strict=True)):
            rate = (accepted + _PRIOR_WEIGHT * rate) / (tried + _PRIOR_WEIGHT)
            rates[i] = rate
        return rates

    def tokens(self) -> NDArray[np.float64]:
        """Expected tokens of a step with 0, 1, ... ``max_length`` drafts, ``[max_length + 1]``."""
        return np.cumsum(np.cumprod(np.concatenate([[1.0], self.rates()])))


class DraftLengthController:
    """Chooses the draft length of a group of requests that are stepped together.

    Use: ``K = choose(rows)``, draft up to K tokens a row, run the step, ``observe(...)``; one ``observe`` for
    each ``choose``.

    The length changes when another promises ``hysteresis`` more tokens a second; nothing is drafted where drafts do not
    promise a tenth more than plain decoding, which is measured for some steps first. Besides, now and then a step
    *probes* another length, in turn one more, one less and the one not run for longest, or from 0 the one that
    promises most and 1: this keeps the estimates alive and finds out when drafts begin to pay again. Probes are
    paid from a credit, which every step raises by ``probe_budget`` of its duration; a probe lowers it by the time
    it lost. So probes cost no more than that share of the time, however bad the drafts are.

    Args:
        max_length: Most drafts of a step, >= 0.
        target: Cost of the target's steps by width, possibly shared.
        drafter: Cost of drafting by the drafts of a row, possibly shared.
        hysteresis: Relative gain below which the length stays.
        probe_budget: Share of the time that probes may lose.

    Attributes:
        acceptance: What is known of the drafts.
        length: The length in use, probes aside.
    """

    def __init__(
        self,
        max_length: int,
        *,
        target: CostTable | None = None,
        drafter: CostTable | None = None,
        hysteresis: float = 0.02,
        probe_budget: float = 0.01,
    ) -> None:
        if max_length < 0:
            raise ValueError(f"max_length is {max_length}; it must be at least 0")
        self.acceptance = AcceptanceModel(max_length)
        self.length = 0
        self._target = CostTable() if target is None else target
        self._drafter = CostTable(free_at_zero=True) if drafter is None else drafter
        self._max_length = max_length
        self._hysteresis = hysteresis
        self._probe_budget = probe_budget
        self._decided = (0, 0)  # for how many rows, and how many steps ago
        self._credit = 0.0
        self._steps = 0
        self._last_run = [0] * (max_length + 1)  # step at which each length ran
        self._since_probe = 0
        self._probes = 0
        self._idle = True  # whether nothing was drafted in the last step
        # The running probe: its length, and the tokens a second that it forgoes; and how many steps it goes on for.
        self._probing: tuple[int, float] | None = None
        self._probe_steps = 0

    def choose(self, rows: int) -> int:
        """How many tokens to draft for each row of the next step, 0 to ``max_length``.

        Args:
            rows: Rows of the step, >= 1.
        """
        rows = CostTable.bucket(rows)
        if self._probing is not None and self._probe_steps > 0:
            return self._probing[0]
        self._probing = None
        if self._max_length == 0 or not self._target.is_measured(rows, 1, _PLAIN_STEPS):
            return 0  # what drafts gain is told by comparison with plain decoding
        decided_rows, age = self._decided
        if rows != decided_rows or age >= _DECISION_INTERVAL:
            self._decide(rows)
        if self._since_probe >= _PROBE_INTERVAL and self._credit > 0:
            return self._probe(rows)
        return self.length

    @property
    def probing(self) -> bool:
        """Whether the length that :meth:`choose` gave last is one to be tried out."""
        return self._probing is not None

    @property
    def is_off(self) -> bool:
        """Whether drafts are known not to pay, and none are to be tried in the next step."""
        known = self._target.is_measured(max(self._decided[0], 1), 1, _PLAIN_STEPS)
        return known and self.length == 0 and self._probe_steps <= 0

    @property
    def is_hopeless(self) -> bool:
        """Whether drafts were tried and found not to pay."""
        return self.is_off and self._drafter.is_known(max(self._decided[0], 1))

    def price(self, rows: int) -> float:
        """Tokens that a draft must bring to be worth verifying: what it costs the step, in tokens of that time.

        Args:
            rows: Rows of the step, >= 1.
        """
        rows, drafts = CostTable.bucket(rows), max(self.length, 1)
        cost = self._target.estimate(rows, drafts + 1)
        growth = max(cost - self._target.estimate(rows, 1), 0.0) / drafts
        return float(self.acceptance.tokens()[drafts]) * growth / cost if cost else 0.0

    def observe(self, results: Sequence[tuple[int, int]], seconds: float, draft_seconds: float = 0.0) -> None:
        """Learn from the step that :meth:`choose` was asked for.

        Args:
            results: For each row of the step how many tokens were drafted, which may be fewer than asked for,
                and how many of them were accepted. Drafts behind an accepted end token were not rejected: such a
                row counts as ``(accepted, accepted)``.
            seconds: Duration of the target's step, finite and >= 0.
            draft_seconds: Duration of drafting.

        Raises:
            ValueError: There is no row, or a number is out of range.
        """
        if any(not 0 <= accepted <= drafted <= self._max_length for drafted, accepted in results):
            raise ValueError(
                f"{list(results)} are not pairs of 0 <= accepted <= drafted <= {self._max_length}"
            )
        rows, longest = len(results), max((drafted for drafted, _ in results), default=0)
        self._steps += 1
        self._last_run[longest] = self._steps
        known = self._target.is_measured(rows, longest + 1)
        self._target.observe(rows, longest + 1, seconds)
        self._probe_steps -= 1
        if longest:
            self._drafter.observe(rows, longest, draft_seconds, usual=not self._idle)
            off = self._probing is not None and self.length == 0
            self.acceptance.observe(results, _PROBE_DECAY if off else _DECAY)
        self._idle = longest == 0
        tokens = 1 + sum(accepted for _, accepted in results) / rows
        self._settle(tokens, seconds + draft_seconds, drafted=longest > 0)
        is_news = not known and self._target.is_measured(rows, longest + 1)
        self._decided = (self._decided[0], _DECISION_INTERVAL if is_news else self._decided[1] + 1)

    def _costs(self, rows: int) -> NDArray[np.float64]:
        """Estimated seconds of a step with 0, 1, ... ``max_length`` drafts."""
        lengths = range(self._max_length + 1)
        costs = [self._target.estimate(rows, k + 1) + self._drafter.estimate(rows, k) for k in lengths]
        return np.array(costs)

    def _decide(self, rows: int) -> None:
        rates = self.acceptance.tokens() / self._costs(rows)
        best = int(np.argmax(rates))
        if rates[best] < rates[0] * (1 + _LEAST_GAIN):
            self.length = 0
        elif rates[best] > rates[self.length] * (1 + self._hysteresis):
            self.length = best
        self._decided = (rows, 0)

    def _probe(self, rows: int) -> int:
        """The length to probe, or the length in use if the credit is not enough yet."""
        tokens, costs = self.acceptance.tokens(), self._costs(rows)
        rates = tokens / costs
        if self.length == 0:
            candidates = [1 + int(np.argmax(rates[1:])), 1]
        else:
            others = [k for k in range(self._max_length + 1) if k != self.length]
            oldest = min(others, key=lambda k: (self._target.is_measured(rows, k + 1), self._last_run[k]))
            # At the most there is no more; then less is probed more often.
            candidates = [min(self.length + 1, self._max_length - 1), self.length - 1, oldest]
        probe = candidates[self._probes % len(candidates)]
        rate = float(rates[self.length])
        loss = float(costs[probe] - tokens[probe] / rate) * (1 if self.length else _PROBE_STEPS)
        if self._credit < min(loss, self._most_credit(float(costs[0]))):
            return self.length
        self._probing = (probe, rate)
        self._probe_steps = 1 if self.length else _PROBE_STEPS
        return probe

    def _most_credit(self, seconds: float) -> float:
        return _MOST_STEPS_IN_DEBT * self._probe_budget * seconds

    def _settle(self, tokens: float, seconds: float, *, drafted: bool) -> None:
        """Earn credit for a step of so many tokens a row, and pay for it if it was a probe."""
        self._credit += self._probe_budget * seconds
        self._since_probe += 1
        if self._probing is not None:
            probe, rate = self._probing
            self._credit -= max(seconds - tokens / rate, 0.0)
            if drafted or probe == 0:  # else there was nothing to draft, and the next step tries again
                self._since_probe = 0
                self._probes += 1
        most = self._most_credit(seconds)
        self._credit = min(max(self._credit, -_PROBE_STEPS * most), most)
