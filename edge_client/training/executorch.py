"""The ExecuTorch backend: the bundle's `train.pte` and `eval.pte`, run by ExecuTorch's Python runtime.

It exists to prove the programs that a phone runs, and as the third engine. ExecuTorch's binding for Python takes and
gives PyTorch tensors, so on a PC this backend needs the extra `author`; on a phone ExecuTorch's own runtime opens the
same files without PyTorch. The programs hold no weights: everything goes in and comes out by position, in the order
of the manifest (`edge_export.executorch.parts`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from executorch.extension.pybindings import portable_lib
from executorch.runtime import Method, Program, Runtime, Verification
from numpy.typing import NDArray

from edge_client.bundle import F32, Bundle, Manifest, Tensor, views
from edge_client.errors import BundleError, ConfigError
from edge_client.narrow import Kept
from edge_client.training import Gradient, Trainer
from edge_client.training.narrowed import Embedded, Narrowed


class ExecuTorchTrainer:
    """See :class:`edge_client.training.Trainer`."""

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        self.manifest: Manifest = bundle.manifest
        self._bundle = bundle
        self._narrowed = Narrowed()
        self._gradient: F32 = np.zeros(self.manifest.d, np.float32)
        self._buffers: F32 = np.zeros(self.manifest.buffers_d, np.float32)
        if portable_lib._threadpool_get_thread_count() != threads:  # one pool for the whole process
            portable_lib._unsafe_reset_threadpool(threads)

    def _method(self, part: str) -> tuple[Method, int, Program]:
        """The method of `part`, the most samples of a batch that it runs, and its program, without which it is gone."""
        data = self._bundle.part(part).read_bytes()
        try:
            program = Runtime.get().load_program(data, verification=Verification.InternalConsistency)
            method = program.load_method("forward")
            assert method is not None
            place = len(self.manifest.parameters) + len(self.manifest.buffers)
            return method, int(method.metadata.input_tensor_meta(place).sizes()[0]), program
        except (RuntimeError, KeyError, IndexError, AssertionError) as error:
            raise BundleError(f"ExecuTorch cannot open {part}: {error}; export the bundle again") from None

    @cached_property
    def _train(self) -> tuple[Method, int, Program]:
        return self._method("train.pte")

    @cached_property
    def _eval(self) -> tuple[Method, int, Program]:
        return self._method("eval.pte")

    def _state(self, parameters: F32, buffers: F32) -> list[torch.Tensor]:
        m = self.manifest
        return [*_tensors(m.parameters, parameters), *_tensors(m.buffers, buffers)]

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any], key: int = 0) -> Gradient:
        if self.manifest.draws:
            raise ConfigError("train.pte holds no dropout; train this bundle with the backend onnxruntime or torch")
        method, most, _ = self._train
        if len(x) > most:
            raise ConfigError(
                f"a batch of {len(x)} samples is more than the {most} that train.pte runs; set a smaller batch, or "
                "export the bundle with --executorch-batch"
            )
        m = self.manifest
        loss, *made = method.execute([*self._state(parameters, buffers), _tensor(x), _tensor(y)])
        trainable = tuple(t for t in m.parameters if t.trainable)
        into = [*views(trainable, self._gradient).values(), *views(m.buffers, self._buffers).values()]
        for view, value in zip(into, made, strict=True):
            view[...] = value.numpy()
        return Gradient(float(loss), self._gradient, self._buffers)

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        method, most, _ = self._eval
        state = self._state(parameters, buffers)
        parts = [method.execute([*state, _tensor(x[i : i + most])])[0].numpy() for i in range(0, len(x), most)]
        made: F32 = np.concatenate(parts)
        return made

    def narrow(self, kept: Kept) -> Trainer:
        return self._narrowed.get(self, kept, lambda: Embedded(self, kept))


def _tensors(table: tuple[Tensor, ...], flat: F32) -> list[torch.Tensor]:
    if not flat.flags.writeable:  # a payload's: torch has no read-only tensors and warns
        flat = flat.copy()
    return [torch.from_numpy(view) for view in views(table, flat).values()]


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())
