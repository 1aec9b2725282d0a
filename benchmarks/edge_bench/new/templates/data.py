"""Your data: `load` returns all samples, and `[data]` in simulate.toml divides them over devices.

x: numbers [n, ...], y: labels [n]. Also understood: owner [n] (the device of each sample, a number or a name),
group [n] (samples to keep together), is_test [n]; or a dictionary of each device's name to its own x and y.
"""

import numpy as np
from sklearn.datasets import load_digits  # pip install scikit-learn


def load() -> dict[str, np.ndarray]:
    """1,797 handwritten digits: grey images [n, 1, 8, 8] in 0..1, and the digit."""
    x, y = load_digits(return_X_y=True)
    return {"x": (x / 16).astype(np.float32).reshape(-1, 1, 8, 8), "y": y}
