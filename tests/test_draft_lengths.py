# SPDX-License-Identifier: Apache-2.0
"""The draft length against simulated engines and texts, whose best length is known."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from nemo_build.runtime.speculation.lengths import (
    AcceptanceModel,
    CostTable,
    DraftLengthController,
    _non_decreasing,
)

MAX = 7
Cost = Callable[[int, int], float]


def bandwidth_bound(rows: int, width: int) -> float:
    """Verification costs next to nothing."""
    return 1 + 0.02 * (width - 1) * rows


def compute_bound(rows: int, width: int) -> float:
    return 1 + 0.3 * (width - 1) * rows**0.5


def stepped(rows: int, width: int) -> float:
    """Kernels for 1, 4 and 8 tokens."""
    return 1 + 0.25 * (width > 1) + 0.5 * (width > 4)


def recurrent(rows: int, drafts: int) -> float:
    return 0.12 * drafts


def block(rows: int, drafts: int) -> float:
    return 0.3 if drafts else 0.0


@dataclass
class Simulation:
    """An engine and a text, run with a controller.

    Attributes:
        lengths: The length of each step.
        seconds: Time so far.
        tokens: Tokens of a row so far.
    """

    target: Cost
    drafter: Cost
    rows: int = 1
    noise: float = 0.0
    controller: DraftLengthController = field(default_factory=lambda: DraftLengthController(MAX))
    lengths: list[int] = field(default_factory=list)
    seconds: float = 0.0
    tokens: float = 0.0

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(3)

    def run(self, steps: int, acceptance: Sequence[float]) -> list[int]:
        """Go on for so many steps of a text; the lengths chosen."""
        for _ in range(steps):
            k = self.controller.choose(self.rows)
            hits = self._random.random((self.rows, k)) < np.array(acceptance[:k])
            accepted = np.cumprod(hits, axis=1).sum(axis=1)
            target, drafter = self.target(self.rows, k + 1), self.drafter(self.rows, k)
            slow = 1 + self.noise * np.abs(self._random.normal(size=2))
            results = [(k, int(n)) for n in accepted]
            self.controller.observe(results, target * slow[0], drafter * slow[1])
            self.lengths.append(k)
            self.seconds += target + drafter
            self.tokens += 1 + accepted.mean()
        return self.lengths[-steps:]

    def rates(self, acceptance: Sequence[float]) -> NDArray[np.float64]:
        """True tokens a second of each length."""
        tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(acceptance))])
        costs = [self.target(self.rows, k + 1) + self.drafter(self.rows, k) for k in range(MAX + 1)]
        return tokens / np.array(costs)


DECLINING = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]


# --- the controller ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("acceptance", [[0.5] * MAX, [0.8] * MAX, [0.97] * MAX, DECLINING])
@pytest.mark.parametrize(("rows", "target", "drafter"), [
    (1, bandwidth_bound, recurrent),
    (8, bandwidth_bound, recurrent),
    (1, compute_bound, recurrent),
    (8, compute_bound, recurrent),
    (2, stepped, recurrent),
    (2, stepped, block),
])  # fmt: skip
def test_the_length_is_the_best_or_as_good(
    rows: int, target: Cost, drafter: Cost, acceptance: list[float], noise: float
) -> None:
    simulation = Simulation(target, drafter, rows, noise)
    simulation.run(500, acceptance)
    rates = simulation.rates(acceptance)
    found = np.mean([rates[k] for k in simulation.run(1000, acceptance)])
    assert found >= 0.95 * rates.max()


def test_the_example_has_many_answers() -> None:
    """Else the test above could be passed by a constant."""
    best = {
        int(np.argmax(Simulation(target, recurrent, rows).rates(acceptance)))
        for target in (bandwidth_bound, compute_bound, stepped)
        for rows in (1, 8)
        for acceptance in ([0.5] * MAX, [0.97] * MAX, DECLINING)
    }
    assert len(best) >= 5


@pytest.mark.parametrize("target", [bandwidth_bound, compute_bound, stepped])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_useless_drafts_cost_less_than_3_percent(target: Cost, rows: int, noise: float) -> None:
    simulation = Simulation(target, recurrent, rows, noise)
    simulation.run(3000, [0.0] * MAX)
    assert simulation.seconds < 3000 * target(rows, 1) * 1.03
    assert simulation.controller.length == 0
    assert any(simulation.lengths[-600:])  # and yet it keeps looking


def test_probes_of_any_price_keep_to_their_budget() -> None:
    for price in (0.01, 0.3, 3.0, 8.0):
        simulation = Simulation(lambda rows, width, p=price: 1 + p * (width > 1), lambda rows, k: 0.0)  # type: ignore[misc]
        simulation.run(500, [0.0] * MAX)
        start = simulation.seconds
        lengths = simulation.run(4000, [0.0] * MAX)
        assert any(lengths)
        assert simulation.seconds - start < 4000 * 1.02 + 1 + price


def test_probes_while_drafting_keep_to_their_budget() -> None:
    simulation = Simulation(bandwidth_bound, recurrent)
    simulation.run(500, [0.97] * MAX)
    lengths, best = simulation.run(2000, [0.97] * MAX), int(np.argmax(simulation.rates([0.97] * MAX)))
    assert {0, best, best - 1} <= set(lengths)
    rates = simulation.rates([0.97] * MAX)
    assert np.mean([rates[k] for k in lengths]) > 0.97 * rates[best]


@pytest.mark.parametrize("good", [0.8, 0.95])
def test_it_follows_the_text(good: float) -> None:
    simulation = Simulation(compute_bound, recurrent)
    simulation.run(1500, [0.0] * MAX)
    assert simulation.controller.length == 0
    simulation.run(600, [good] * MAX)
    assert simulation.controller.length >= 1
    rates = simulation.rates([good] * MAX)
    assert np.mean([rates[k] for k in simulation.run(500, [good] * MAX)]) > 0.93 * rates.max()
    simulation.run(150, [0.0] * MAX)
    assert simulation.controller.length == 0


def test_it_follows_the_number_of_rows() -> None:
    simulation = Simulation(compute_bound, recurrent)
    for _ in range(6):
        for rows, drafts in ((1, True), (16, False)):
            simulation.rows = rows
            simulation.run(100, [0.8] * MAX)
            assert (simulation.controller.length > 0) == drafts


def test_it_follows_the_costs() -> None:
    simulation = Simulation(bandwidth_bound, recurrent)
    simulation.run(300, [0.8] * MAX)
    assert simulation.controller.length >= 3
    simulation.target = lambda rows, width: 1.0 * width
    simulation.run(300, [0.8] * MAX)
    assert simulation.controller.length == 0
    simulation.target = bandwidth_bound
    simulation.run(1500, [0.8] * MAX)
    assert simulation.controller.length >= 3


def test_a_slow_first_step_of_a_width_does_not_count() -> None:
    seen: set[int] = set()

    def compiling(rows: int, width: int) -> float:
        first = width not in seen
        seen.add(width)
        return bandwidth_bound(rows, width) + 100 * first

    simulation = Simulation(compiling, recurrent)
    simulation.run(300, [0.9] * MAX)
    rates = Simulation(bandwidth_bound, recurrent).rates([0.9] * MAX)
    assert rates[simulation.controller.length] > 0.95 * rates.max()


def test_small_gains_do_not_change_the_length() -> None:
    """Two lengths that are as good as each other: one is kept, probes aside."""
    simulation = Simulation(lambda rows, width: 1 + 0.5 * (width - 1), lambda rows, k: 0.0)
    simulation.run(300, [0.5] * MAX)
    lengths = simulation.run(1000, [0.5] * MAX)
    assert sum(a != b for a, b in itertools.pairwise(lengths)) < 250


def test_the_same_calls_give_the_same_lengths() -> None:
    runs = [Simulation(compute_bound, recurrent, noise=0.2) for _ in range(2)]
    assert runs[0].run(800, [0.6] * MAX) == runs[1].run(800, [0.6] * MAX)


def test_nothing_to_draft_is_no_probe() -> None:
    """A drafter that finds nothing (n-grams) is asked again at the next step."""
    controller = DraftLengthController(MAX)
    asked = []
    for _ in range(400):
        asked.append(controller.choose(1))
        controller.observe([(0, 0)], 1.0)
    assert not any(asked[:13])
    assert all(asked[13:])  # cost nothing, promise much
    useless = Simulation(compute_bound, recurrent)
    useless.run(1000, [0.0] * MAX)
    while not useless.controller.choose(1):
        useless.controller.observe([(0, 0)], 1.0)
    for _ in range(3):
        useless.controller.observe([(0, 0)], 1.0)
        assert useless.controller.choose(1)


def test_costs_may_be_shared() -> None:
    target, drafter = CostTable(), CostTable(free_at_zero=True)
    first = Simulation(
        bandwidth_bound, recurrent, controller=DraftLengthController(MAX, target=target, drafter=drafter)
    )
    first.run(500, DECLINING)
    second = DraftLengthController(MAX, target=target, drafter=drafter)
    assert second.choose(1) > 0  # no step to learn what plain decoding costs


def test_no_drafts_at_all() -> None:
    controller = DraftLengthController(0)
    for _ in range(50):
        assert controller.choose(3) == 0
        controller.observe([(0, 0)] * 3, 1.0)


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.observe([(2, 3)], 1.0),
        lambda c: c.observe([(MAX + 1, 0)], 1.0),
        lambda c: c.observe([(1, -1)], 1.0),
        lambda c: c.observe([], 1.0),
        lambda c: c.observe([(0, 0)], -1.0),
        lambda c: c.observe([(0, 0)], float("nan")),
        lambda c: c.observe([(1, 0)], 1.0, float("inf")),
        lambda c: DraftLengthController(-1),
    ],
)
def test_misuse(call: Callable[[DraftLengthController], Any]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        call(DraftLengthController(MAX))


# --- costs -------------------------------------------------------------------------------------------------


def table(cells: dict[tuple[int, int], float], **options: bool) -> CostTable:
    made = CostTable(**options)
    for (rows, width), seconds in cells.items():
        for _ in range(2):  # the first does not count
            made.observe(rows, width, seconds)
    return made


def test_rows_share_cells() -> None:
    rows = [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 255]
    assert [CostTable.bucket(n) for n in rows] == [1, 2, 3, 4, 4, 6, 6, 8, 8, 12, 192]


def test_estimates_by_hand() -> None:
    costs = table({(1, 1): 1.0, (1, 5): 3.0, (4, 1): 2.0})
    assert costs.estimate(1, 5) == 3.0
    assert costs.estimate(1, 3) == 1.5  # half as far above (1, 1) as the line to (1, 5)
    assert costs.estimate(2, 2) == 2.0  # from the curve by tokens: (1, 1), (4, 2), (5, 3)
    assert costs.estimate(1, 6) == 4.0  # beyond: as between the last two
    assert costs.estimate(4, 2) == 2.0 * 6 / 2  # scaled to (4, 1)
    assert CostTable().estimate(1, 1) == 0
    assert table({(1, 1): 2.0}).estimate(1, 8) == 2.0


def test_estimates_of_a_drafter_by_hand() -> None:
    costs = table({(1, 2): 1.0}, free_at_zero=True)
    assert [costs.estimate(1, k) for k in (0, 1, 2, 4)] == [0, 0.25, 1, 2]


def test_averages_go_down_at_once_and_up_slowly() -> None:
    costs = table({(1, 1): 1.0})
    costs.observe(1, 1, 100.0)
    assert costs.estimate(1, 1) == pytest.approx(1.05)
    costs.observe(1, 1, 0.1)
    assert costs.estimate(1, 1) == 0.1
    for _ in range(200):
        costs.observe(1, 1, 5.0)
    assert costs.estimate(1, 1) == pytest.approx(5.0, rel=0.01)


cells = st.dictionaries(st.tuples(st.integers(1, 40), st.integers(1, 9)), st.floats(0, 10), max_size=12)


@given(cells, st.integers(1, 40), st.integers(0, 12), st.booleans())
def test_estimates_are_numbers(
    known: dict[tuple[int, int], float], rows: int, width: int, free: bool
) -> None:
    estimate = table(known, free_at_zero=free).estimate(rows, width)
    assert 0 <= estimate < float("inf")


@given(st.lists(st.floats(0, 100), max_size=12))
def test_the_nearest_non_decreasing_sequence(values: list[float]) -> None:
    fitted = _non_decreasing(values)
    assert all(a <= b for a, b in itertools.pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values))
    # Pools are averages: what is left is orthogonal to the fit (optimality of a projection on a cone).
    assert float(np.dot(np.subtract(values, fitted), fitted)) == pytest.approx(0, abs=1e-6)
    assert _non_decreasing(sorted(values)) == sorted(values)


# --- acceptance --------------------------------------------------------------------------------------------


def test_acceptance_is_conditional() -> None:
    model = AcceptanceModel(3)
    for _ in range(2000):
        model.observe([(3, 0), (3, 1), (3, 3), (2, 2)], decay=0.999)
    assert model.rates() == pytest.approx([3 / 4, 2 / 3, 1.0], abs=0.01)
    assert model.tokens() == pytest.approx([1, 1.75, 2.25, 2.75], abs=0.02)


def test_depths_not_tried_follow_those_that_are() -> None:
    model = AcceptanceModel(3)
    for _ in range(200):
        model.observe([(3, 1)], decay=0.9)
    assert model.rates()[1] < 0.2
    for _ in range(200):
        model.observe([(1, 1)], decay=0.9)
    assert model.rates()[1:] == pytest.approx([model.rates()[0]] * 2, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda p: (max(p), min(p))), max_size=30))
def test_expected_tokens_are_possible(results: list[tuple[int, int]]) -> None:
    model = AcceptanceModel(3)
    model.observe(results, decay=0.5)
    tokens = model.tokens()
    assert tokens[0] == 1
    assert (np.diff(tokens) >= 0).all()
    assert (tokens <= np.arange(1, 5)).all()
