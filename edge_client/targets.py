"""What a model predicts: a class, a label for each step of a sequence, or numbers.

A target is a tagged entry of the manifest. It names the loss that `train.onnx` computes, checks a device's labels, and
scores outputs. Nothing else tells the kinds apart. Scores are higher when better: accuracy for labels, the
coefficient of determination R^2 for numbers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from edge_client.errors import DataError

Labels = NDArray[Any]
WORST = -1e6  # the least score that is reported: R^2 has no lower bound


class _Target(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Classification(_Target):
    """One of `classes` labels a sample. Labels int64[n], outputs float32[n, classes]."""

    kind: Literal["classification"] = "classification"
    classes: Annotated[int, Field(gt=1)]
    loss: Literal["cross_entropy"] = "cross_entropy"

    def check(self, y: Labels, what: str) -> Labels:
        """The labels as int64[n]. Raises DataError."""
        return _classes(y, self.classes, 1, what)

    def score(self, outputs: NDArray[Any], y: Labels) -> float:
        """The share of samples whose largest output is the label's."""
        return float((outputs.argmax(axis=-1) == y).mean())


class Sequence(_Target):
    """One of `classes` labels for each step. Labels int64[n, steps], outputs float32[n, steps, classes]."""

    kind: Literal["sequence"] = "sequence"
    classes: Annotated[int, Field(gt=1)]
    loss: Literal["cross_entropy"] = "cross_entropy"

    def check(self, y: Labels, what: str) -> Labels:
        """The labels as int64[n, steps]. Raises DataError."""
        return _classes(y, self.classes, 2, what)

    def score(self, outputs: NDArray[Any], y: Labels) -> float:
        """The share of steps whose largest output is the label's."""
        return float((outputs.argmax(axis=-1) == y).mean())


class Regression(_Target):
    """`outputs` numbers a sample. Labels and outputs float32[n, outputs]."""

    kind: Literal["regression"] = "regression"
    outputs: Annotated[int, Field(gt=0)] = 1
    loss: Literal["mean_squared_error"] = "mean_squared_error"

    def check(self, y: Labels, what: str) -> Labels:
        """The values as float32[n, outputs]; [n] is taken for one output. Raises DataError."""
        if not (np.issubdtype(y.dtype, np.floating) or np.issubdtype(y.dtype, np.integer)):
            raise DataError(f"{what}: values have dtype {y.dtype}; give numbers")
        shaped = y.reshape(-1, 1) if y.ndim == 1 else y
        if shaped.ndim != 2 or shaped.shape[1] != self.outputs:
            raise DataError(f"{what}: values have shape {y.shape}; the model gives [n, {self.outputs}]")
        values = np.ascontiguousarray(shaped, np.float32)
        if not np.isfinite(values).all():
            raise DataError(f"{what}: a value is NaN or infinite; clean the data")
        return values

    def score(self, outputs: NDArray[Any], y: Labels) -> float:
        """R^2 over all outputs together: 1 - squared error / squared deviation from the mean, at least `WORST`."""
        error = float(np.square(outputs.astype(np.float64) - y).sum())
        spread = float(np.square(y.astype(np.float64) - y.mean(axis=0)).sum())
        if spread == 0.0:
            return 1.0 if error == 0.0 else WORST
        return max(1.0 - error / spread, WORST)


Target = Annotated[Classification | Sequence | Regression, Field(discriminator="kind")]


def _classes(y: Labels, classes: int, dimensions: int, what: str) -> Labels:
    if not np.issubdtype(y.dtype, np.integer):
        raise DataError(f"{what}: labels have dtype {y.dtype}; give integers 0..{classes - 1}")
    if y.ndim != dimensions:
        raise DataError(f"{what}: labels have shape {y.shape}; give {dimensions} dimension(s), samples first")
    bad = (y < 0) | (y >= classes)
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(f"{what}: label {y[at]} at {list(at)} is outside 0..{classes - 1}")
    return y.astype(np.int64)
