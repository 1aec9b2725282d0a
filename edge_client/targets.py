"""What a model predicts: a class, a label for each step of a sequence, or numbers.

A target is an entry of the manifest with a `kind`. It checks a device's labels, scores the model's outputs, and defines
the loss; nothing else tells the kinds apart. A score is higher when the model is better and at most 1: accuracy for
labels, the coefficient of determination R^2 for numbers.

The loss travels inside `train.onnx`. Only the exporter and the PyTorch backend call `torch_loss`, whose code uses the
methods of the tensors that it receives and so never imports torch.

Targets are entry points of the group `maskfleet.targets`, each under its kind. A third party adds one by a subclass of
`Target` in a package of its own, installed where models are exported, coordinated and trained.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, WithJsonSchema

from edge_client.errors import ConfigError, DataError
from edge_client.extras import installed, load, subclass_of

Labels = NDArray[Any]
WORST = -1e6  # the least score that is reported: R^2 has no lower bound
LEFT_OUT = -100  # the label of a step that counts in no loss and no score: PyTorch's `ignore_index`
_MOST = 2**31 - 1

Size = Annotated[int, Field(gt=0, le=_MOST)]
Classes = Annotated[int, Field(gt=1, le=_MOST)]


class Target(BaseModel):
    """Base of every target: its fields are what the manifest holds.

    `shape` names the fields that give the shape of one sample's outputs, in order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    shape: ClassVar[tuple[str, ...]] = ()
    kind: str

    @classmethod
    def sizes(cls, output: tuple[int, ...]) -> Mapping[str, int]:
        """The settings that follow from the shape of one sample's outputs; none when the shape does not suit."""
        return dict(zip(cls.shape, output, strict=True)) if len(output) == len(cls.shape) else {}

    @property
    def output(self) -> tuple[int, ...]:
        """The shape of one sample's outputs."""
        return tuple(getattr(self, name) for name in self.shape)

    @abstractmethod
    def labels(self, n: int) -> Labels:
        """Labels of `n` samples, all zero, in the dtype and shape that `train.onnx` takes."""
        ...

    @abstractmethod
    def check(self, y: Labels, what: str) -> Labels:
        """A device's labels in the dtype and shape of `labels`. Raises DataError naming `what` and the value."""
        ...

    @abstractmethod
    def score(self, outputs: NDArray[Any], y: Labels) -> float:
        """How good outputs float32[n, *output] are, between `WORST` and 1."""
        ...

    @abstractmethod
    def torch_loss(self, outputs: Any, y: Any) -> Any:
        """The batch's mean loss, a differentiable scalar, from torch tensors like `score`'s arrays."""
        ...


class _Labels(Target):
    """A label from 0 up for each row of outputs: the last axis of the outputs has one value for each class."""

    def labels(self, n: int) -> Labels:
        """int64, the shape of the outputs less the last axis."""
        return np.zeros((n, *self.output[:-1]), np.int64)

    def check(self, y: Labels, what: str) -> Labels:
        """The labels as int64. Raises DataError."""
        *due, classes = self.output
        if y.shape[1:] == self.output:
            raise DataError(
                f"{what}: labels have shape {y.shape}, as one-hot ones have; give y.argmax(axis=-1), shape "
                f"{(len(y), *due)}"
            )
        if not np.issubdtype(y.dtype, np.integer):
            raise DataError(f"{what}: labels have dtype {y.dtype}; give integers 0..{classes - 1}")
        if y.ndim == 0 or y.shape[1:] != tuple(due):
            raise DataError(f"{what}: labels have shape {y.shape}; give {(*y.shape[:1], *due)}, samples first")
        bad = (y < 0) | (y >= classes)
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            where = ", ".join(map(str, at))
            raise DataError(
                f"{what}: label {y[at]} at index {where} is outside 0..{classes - 1}, the model's {classes} classes; "
                "number the classes from 0, and give the model an output for each"
            )
        return y.astype(np.int64)

    def score(self, outputs: NDArray[Any], y: Labels) -> float:
        """The share of labels that are the largest output."""
        return float((outputs.argmax(axis=-1) == y).mean())

    def torch_loss(self, outputs: Any, y: Any) -> Any:
        """Cross-entropy, the mean over labels; the last axis holds the logits."""
        truth = (y.unsqueeze(-1) == y.new_tensor(range(self.output[-1]))).to(outputs.dtype)
        return -(outputs.log_softmax(-1) * truth).sum(-1).mean()


class Classification(_Labels):
    """One of `classes` labels a sample. Labels int64[n], outputs float32[n, classes]."""

    shape: ClassVar[tuple[str, ...]] = ("classes",)
    kind: Literal["classification"] = "classification"
    classes: Classes
    loss: Literal["cross_entropy"] = "cross_entropy"


class Sequence(_Labels):
    """One of `classes` labels for each of `steps`. Labels int64[n, steps], outputs float32[n, steps, classes].

    A step without a label, such as the padding of a shorter sequence, has the label `LEFT_OUT`. Every sample has a step
    with a label: else a part of a device's data, or a batch, could be without any.
    """

    shape: ClassVar[tuple[str, ...]] = ("steps", "classes")
    kind: Literal["sequence"] = "sequence"
    steps: Size
    classes: Classes
    loss: Literal["cross_entropy"] = "cross_entropy"

    def check(self, y: Labels, what: str) -> Labels:
        """The labels as int64. Raises DataError, also for a sample without any label."""
        if not np.issubdtype(y.dtype, np.integer):
            return super().check(y, what)
        counted = y != LEFT_OUT
        try:
            labels = super().check(np.where(counted, y, 0), what)
        except DataError as error:
            raise DataError(f"{error}; {LEFT_OUT} marks a step without a label") from None
        if (empty := ~counted.any(axis=1)).any():
            raise DataError(
                f"{what}: sample {empty.argmax()} has no label, each of its steps has {LEFT_OUT}; leave the sample out"
            )
        return np.where(counted, labels, LEFT_OUT)

    def score(self, outputs: NDArray[Any], y: Labels) -> float:
        """The share of labels that are the largest output, of those that count."""
        return float((outputs.argmax(axis=-1) == y).sum() / (y != LEFT_OUT).sum())

    def torch_loss(self, outputs: Any, y: Any) -> Any:
        """Cross-entropy, the mean over the labels that count."""
        # `_Labels.torch_loss` is 0 at a step left out, but counts it: dividing by the share that counts takes it out.
        return super().torch_loss(outputs, y) / (y != LEFT_OUT).to(outputs.dtype).mean()


class Regression(Target):
    """`outputs` numbers a sample. Labels and outputs float32[n, outputs]."""

    shape: ClassVar[tuple[str, ...]] = ("outputs",)
    kind: Literal["regression"] = "regression"
    outputs: Size
    loss: Literal["mean_squared_error"] = "mean_squared_error"

    def labels(self, n: int) -> Labels:
        """float32[n, outputs]."""
        return np.zeros((n, self.outputs), np.float32)

    def check(self, y: Labels, what: str) -> Labels:
        """The values as float32[n, outputs]; y of shape [n] is taken for one output. Raises DataError."""
        if not (np.issubdtype(y.dtype, np.floating) or np.issubdtype(y.dtype, np.integer)):
            raise DataError(f"{what}: the values to predict have dtype {y.dtype}; give numbers")
        shaped = y.reshape(-1, 1) if y.ndim == 1 else y
        if shaped.ndim != 2 or shaped.shape[1] != self.outputs:
            raise DataError(
                f"{what}: the values to predict have shape {y.shape}; give {self.outputs} for each sample, shape "
                f"{(len(y), self.outputs)}, or integers if they are classes"
            )
        with np.errstate(over="ignore"):
            values = np.ascontiguousarray(shaped, np.float32)
        if not np.isfinite(values).all():
            at = int(np.argwhere(~np.isfinite(values))[0][0])
            raise DataError(
                f"{what}: the value to predict of sample {at} is NaN, infinite or beyond float32; clean the data"
            )
        return values

    def score(self, outputs: NDArray[Any], y: Labels) -> float:
        """R^2: 1 - squared error / squared deviation from the mean, each summed over all outputs.

        0 when the labels do not vary, where R^2 is undefined, unless every prediction is exact; `WORST` when an
        output is not finite.
        """
        error = float(np.square(outputs.astype(np.float64) - y).sum())
        spread = float(np.square(y.astype(np.float64) - y.mean(axis=0, dtype=np.float64)).sum())
        if not np.isfinite(error):
            return WORST
        if spread == 0.0:
            return 1.0 if error == 0.0 else 0.0
        return max(1.0 - error / spread, WORST)

    def torch_loss(self, outputs: Any, y: Any) -> Any:
        """The squared error, the mean over samples and outputs."""
        return (outputs - y).square().mean()


def target_type(kind: object) -> type[Target]:
    """The installed target of this kind. Raises ValueError with the choices."""
    found = installed("maskfleet.targets")
    if not isinstance(kind, str) or kind not in found:
        raise ValueError(
            f"there is no target {kind!r} here, only {sorted(found)}; install the package that adds it, or another "
            "version of maskfleet"
        )
    try:
        made: type[Target] = load(found[kind], f"target {kind!r}", subclass_of(Target), "complete subclass of Target")
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return made


def _read(value: Any) -> Any:
    if isinstance(value, Mapping):
        return target_type(value.get("kind")).model_validate(value)
    return value


AnyTarget = Annotated[
    SerializeAsAny[Target],
    BeforeValidator(_read),
    WithJsonSchema({"type": "object", "properties": {"kind": {"type": "string"}}, "required": ["kind"]}),
]
"""A field that holds any installed target."""
