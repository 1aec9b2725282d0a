"""The loops of `lattice_model` over elements with numba (extra `fast`): the same numbers in one pass each.

Only `lattice_model` imports this module, and goes on without it where numba is not installed. `tensors` int64[n, 4] are
the place where each tensor begins and that where it ends, its rows and its columns; `rows` and `columns` are the
factors of all tensors end to end. A pass has the positions i with ``low <= i % period < high``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)
def indices(
    base: Any, tensors: Any, rows: Any, columns: Any, low: int, high: int, period: int, table: Any
) -> tuple[Any, Any]:
    """``base`` less the factors for each element of a pass, int16[n], and the table's sum before each, int64[n + 1]."""
    body, rest = divmod(len(base), period)
    count = body * (high - low) + min(max(rest - low, 0), high - low)
    index, before = np.empty(count, np.int16), np.empty(count + 1, np.int64)
    at, above, beside, total = 0, 0, 0, 0
    for t in range(len(tensors)):
        start, stop, tall, wide = tensors[t]
        for block in range(start // period * period, stop, period):
            first = max(block + low, start)
            row, column = divmod(first - start, wide)
            row = above + min(row, tall - 1)
            for i in range(first, min(block + high, stop)):
                found = base[i] - rows[row] - columns[beside + column]
                index[at], before[at] = found, total
                total += table[found]
                at += 1
                column += 1
                if column == wide:
                    column, row = 0, min(row + 1, above + tall - 1)
        above, beside = above + tall, beside + wide
    before[at] = total
    return index, before


@njit(cache=True)
def expected(
    index: Any, tensors: Any, rows: Any, columns: Any, low: int, high: int, period: int, table: Any, size: int
) -> tuple[Any, Any, Any]:
    """The table's sums over a pass by row and by column of each tensor, and how often each index occurs, all int64."""
    by_row, by_column = np.zeros(len(rows), np.int64), np.zeros(len(columns), np.int64)
    counts = np.zeros(size, np.int64)
    at, above, beside = 0, 0, 0
    for t in range(len(tensors)):
        start, stop, tall, wide = tensors[t]
        for block in range(start // period * period, stop, period):
            first = max(block + low, start)
            row, column = divmod(first - start, wide)
            row = above + min(row, tall - 1)
            for _ in range(first, min(block + high, stop)):
                due = np.int64(table[index[at]])
                by_row[row] += due
                by_column[beside + column] += due
                counts[index[at]] += 1
                at += 1
                column += 1
                if column == wide:
                    column, row = 0, min(row + 1, above + tall - 1)
        above, beside = above + tall, beside + wide
    return by_row, by_column, counts
