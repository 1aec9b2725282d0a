"""The default backend: stock ONNX Runtime runs the bundle's forward-and-backward graph.

Parameters go in as views of the flat vector, gradients come out into views of another: nothing is copied.
`train.onnx` is opened at the first gradient, also of a pass after `rest`, and `eval.onnx` at the first logits.
A narrow trainer runs the same graphs on smaller tensors, cut in memory by `edge_client.training.cut`.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edge_client.bundle import F32, Bundle, Tensor, views
from edge_client.errors import BundleError
from edge_client.narrow import Channels
from edge_client.runtimes.onnx import NOT_SPINNING, open_onnx
from edge_client.training import Gradient, Trainer
from edge_client.training.narrowed import Engine

if TYPE_CHECKING:
    from edge_client.training.cut import CutGraphs


class OnnxRuntimeTrainer(Engine):
    """See :class:`edge_client.training.Trainer`. Not for several threads at once: the gradient buffer is its own."""

    def __init__(self, bundle: Bundle | CutGraphs, threads: int = 1) -> None:
        super().__init__(bundle.manifest)
        self._bundle = bundle
        self._threads = threads
        self._loss: F32 = np.zeros((), np.float32)
        self._key = np.zeros(1, np.int64)
        self._bound = (0, 0)  # the addresses of the parameters and statistics that the session reads
        # Outputs land here; views stay valid because the vectors are never replaced.
        trainable = tuple(t for t in self.manifest.parameters if t.trainable)
        gradients = {f"grad:{k}": v for k, v in views(trainable, self._gradient).items()}
        statistics = {f"new:{k}": v for k, v in views(self.manifest.buffers, self._statistics).items()}
        self._outputs = {"loss": self._loss, **gradients, **statistics}

    def _session(self, part: str, arena: bool, plan: bool) -> ort.InferenceSession:
        return open_onnx(
            self._bundle.part(part),
            threads=self._threads, what=part, refused=BundleError, settings=NOT_SPINNING, arena=arena, plan=plan,
        )  # fmt: skip

    @cached_property
    def _train(self) -> tuple[ort.InferenceSession, ort.IOBinding]:
        session = self._session("train.onnx", arena=True, plan=False)
        binding = session.io_binding()
        for name, value in self._outputs.items():
            binding.bind_output(name, "cpu", 0, np.float32, value.shape, value.ctypes.data)
        return session, binding

    @cached_property
    def _eval(self) -> tuple[ort.InferenceSession, set[str]]:
        session = self._session("eval.onnx", arena=False, plan=True)
        return session, {i.name for i in session.get_inputs()}

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any], key: int = 0) -> Gradient:
        session, binding = self._train
        parameters, buffers = _vector(parameters, self.manifest.d), _vector(buffers, self.manifest.buffers_d)
        x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        addresses = parameters.ctypes.data, buffers.ctypes.data
        if addresses != self._bound:  # most steps change the values in place
            self._bound = (0, 0)  # until both are bound
            _bind(binding, self.manifest.parameters, addresses[0])
            _bind(binding, self.manifest.buffers, addresses[1])
            self._bound = addresses
        binding.bind_input("x", "cpu", 0, x.dtype, x.shape, x.ctypes.data)
        binding.bind_input("y", "cpu", 0, y.dtype, y.shape, y.ctypes.data)
        if self.manifest.draws:
            self._key[0] = key
            binding.bind_input("key", "cpu", 0, self._key.dtype, (1,), self._key.ctypes.data)
        session.run_with_iobinding(binding)
        return Gradient(float(self._loss), self._gradient, self._statistics)

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        session, _ = self._eval
        m = self.manifest
        feeds: dict[str, NDArray[Any]] = {**views(m.parameters, parameters), **views(m.buffers, buffers), "x": x}
        logits: F32 = session.run(["logits"], feeds)[0]
        return logits

    def rest(self) -> None:
        self.__dict__.pop("_train", None)  # its activations take more than opening it again is worth
        self._bound = (0, 0)

    def narrow(self, kept: Channels) -> Trainer:
        from edge_client.training.cut import cut_graphs  # onnx is large; only pruning needs it

        graphs = ("train.onnx", "eval.onnx")
        return self._narrowed.get(
            self, kept, lambda: OnnxRuntimeTrainer(cut_graphs(self._bundle, kept, graphs), self._threads)
        )


def _vector(flat: F32, size: int) -> F32:
    """`flat` as the runtime reads it by address: contiguous float32 of the right length."""
    if flat.shape != (size,):
        raise ValueError(f"the shape is {flat.shape}; it must be ({size},)")
    return np.ascontiguousarray(flat, np.float32)


def _bind(binding: ort.IOBinding, table: tuple[Tensor, ...], address: int) -> None:
    for t in table:
        binding.bind_input(t.name, "cpu", 0, np.float32, t.shape, address + 4 * t.offset)
