"""Intervals, gains, areas and transfer."""

import math

import numpy as np
import pytest

from studies import statistics
from studies.statistics import _t_95, gain_fraction, hypervolume, interval, transfer


def test_intervals():
    assert interval([[0.5] * 30]) == (0.5, 0.5)
    assert interval([[0.5] * 30] * 3) == (0.5, 0.5)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_intervals_cover_what_another_text_and_other_seeds_would_give(seeds):
    """Blocks have something in common over seeds, seeds over blocks, and then there is noise."""
    chance = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        table = 1.0 + chance.normal(0, 0.1, (1, 60)) + chance.normal(0, 0.02, (seeds, 1))
        low, high = interval(table + chance.normal(0, 0.02, (seeds, 60)), samples=200, seed=trial)
        covered += low <= 1.0 <= high
    assert covered >= 184  # 92 % of 200


def test_neighbouring_blocks_are_not_independent(monkeypatch):
    """Of what goes up and down slowly, single blocks would promise too much."""

    def coverage():
        chance, covered = np.random.default_rng(0), 0
        for trial in range(200):
            blocks = [0.0]
            for _ in range(99 + 50):
                blocks.append(0.35 * blocks[-1] + chance.normal())
            low, high = interval([blocks[-99:]], samples=300, seed=trial)
            covered += low <= 0.0 <= high
        return covered / 200

    assert coverage() > 0.91
    monkeypatch.setattr(statistics, "RUN", 1)
    assert coverage() < 0.86


def test_intervals_are_around_the_mean_of_everything():
    """The last few tokens make no whole block; the mean counts them."""
    low, high = interval([[0.0, 1.0] * 20])
    assert interval([[0.0, 1.0] * 20], 0.6) == pytest.approx((low + 0.1, high + 0.1))


def test_students_t():
    """Against the usual tables."""
    for freedom, known in ((1, 12.706), (2, 4.303), (9, 2.262), (10, 2.228), (30, 2.042), (math.inf, 1.960)):
        assert _t_95(freedom) == pytest.approx(known, abs=6e-4)


def test_gains_and_areas():
    assert gain_fraction(3.0, 2.0, 2.0) == 1.0  # equal losses are equal gains
    assert gain_fraction(3.0, 3.0, 2.0) == 0.0
    assert math.isnan(gain_fraction(3.0, 2.0, 3.0))  # nothing to have a share of
    assert math.isnan(hypervolume(math.nan, 0.0))
    assert hypervolume(1.0, 0.0) == 1.0
    assert hypervolume(0.5, 0.25) == 0.5 * 0.75
    assert hypervolume(1.0, 2.0) == hypervolume(-1.0, 0.0) == 0.0
    assert hypervolume(1.0, -0.5) == 1.0  # getting better at A is no more than not forgetting it


def test_transfer_of_a_stream():
    matrix = [
        {"A": 1.0, "B": 3.0, "C": 3.0},
        {"A": 1.0, "B": 3.0, "C": 3.0},  # after A
        {"A": 1.5, "B": 2.0, "C": 2.5},  # after B, which also helped C
        {"A": 1.4, "B": 2.2, "C": 1.0},  # after C
    ]
    told = transfer(matrix, ["A", "B", "C"])
    assert told["BWT"] == pytest.approx((1.0 - 1.4 + 2.0 - 2.2) / 2)
    assert told["FWT"] == pytest.approx((0.0 + 0.5) / 2)
    assert told["worst_forgetting"] == pytest.approx(0.4)
    assert told["final"] == pytest.approx((1.4 + 2.2 + 1.0) / 3)
    assert told["worst_on_the_way"] == pytest.approx(0.5)
    back = [*matrix, {"A": 1.0, "B": 2.6, "C": 1.0}]  # A comes back: what was lost before counts
    again = transfer(back, ["A", "B", "C", "A"])
    assert again["BWT"] == told["BWT"]
    assert again["FWT"] == told["FWT"]
    assert again["worst_forgetting"] == pytest.approx(0.6)
    assert again["final"] == pytest.approx((1.0 + 2.6 + 1.0) / 3)
