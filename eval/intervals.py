"""Bootstrap intervals (Efron 1979): resample the requests with replacement and take percentiles of the statistic.

Requests are the unit, not tokens or verifications, which within one text depend on each other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95
BLOCK = 1_000_000  # indices drawn at once, which bounds the memory


@dataclass(frozen=True)
class Estimate:
    """A statistic of the sample, and the ends of its interval."""

    value: float
    low: float
    high: float


def mean(values: np.ndarray) -> np.ndarray:
    """Over the last axis, as every statistic here."""
    return values.mean(axis=-1)


def ratio_of_sums(numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    return numerators.sum(axis=-1) / denominators.sum(axis=-1)


def bootstrap(
    statistic: Callable[..., np.ndarray],
    *columns: Sequence[float],
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = LEVEL,
) -> Estimate | None:
    """The percentile interval of `statistic`, the rows of all `columns` resampled together.

    Args:
        statistic: takes one array a column and reduces its last axis.
        columns: a figure for each request (`n` values each).

    Returns:
        None without a request. One request gives an interval without width, which says nothing.
    """
    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    size = len(arrays[0])
    if any(len(array) != size for array in arrays):
        raise ValueError("the columns of a bootstrap are figures of the same requests, so they are equally long.")
    if size == 0:
        return None
    generator = np.random.default_rng(seed)
    drawn = []
    for start in range(0, resamples, max(1, BLOCK // size)):
        rows = generator.integers(size, size=(min(max(1, BLOCK // size), resamples - start), size))  # [r, n]
        drawn.append(statistic(*(array[rows] for array in arrays)))  # [r]
    low, high = np.quantile(np.concatenate(drawn), [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(statistic(*arrays)), float(low), float(high))
