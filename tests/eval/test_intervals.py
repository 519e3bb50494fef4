"""Bootstrap intervals against distributions that are known."""

import numpy as np
import pytest

from osprey.eval.intervals import bootstrap, mean, ratio_of_sums


def test_mean_of_coin_tosses():
    # Resampling 10 heads and 10 tails gives Binomial(20, 1/2) heads: P(<= 5) = 2.07 %, P(<= 6) = 5.77 %, and the
    # same from above, so the 2.5 % and 97.5 % points are 6 and 14.
    estimate = bootstrap(mean, [0] * 10 + [1] * 10, resamples=20_000)
    assert estimate.value == 0.5
    assert estimate.low == pytest.approx(6 / 20) and estimate.high == pytest.approx(14 / 20)


def test_mean_of_many_draws_is_the_normal_interval():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=400)
    estimate = bootstrap(mean, values, resamples=10_000)
    half = 1.96 * values.std() / 400**0.5
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.15 * half)


def test_a_coarser_level_is_narrower():
    values = list(range(30))
    wide, narrow = bootstrap(mean, values), bootstrap(mean, values, level=0.5)
    assert wide.low < narrow.low < narrow.high < wide.high


def test_pairs_stay_together():
    # Twice as much on every request: whatever is drawn, the ratio is 2. Unpaired, it would vary widely.
    values = np.array([1.0, 10.0, 100.0])
    estimate = bootstrap(ratio_of_sums, 2 * values, values)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)


def test_seeded():
    values = list(range(20))
    assert bootstrap(mean, values, seed=1) == bootstrap(mean, values, seed=1) != bootstrap(mean, values, seed=2)


def test_blocks_do_not_change_the_estimate(monkeypatch):
    whole = bootstrap(mean, list(range(9)), resamples=500)
    monkeypatch.setattr("osprey.eval.intervals.BLOCK", 9 * 7)
    assert bootstrap(mean, list(range(9)), resamples=500) == whole


def test_none_one_and_unequal():
    assert bootstrap(mean, []) is None
    one = bootstrap(mean, [3.0])
    assert one.low == one.value == one.high == 3.0
    with pytest.raises(ValueError, match="equally long"):
        bootstrap(ratio_of_sums, [1.0, 2.0], [1.0])
