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
from numpy.typing import NDArray

from edge_client.bundle import F32, Bundle, Tensor, views
from edge_client.errors import BundleError, ConfigError
from edge_client.runtimes.executorch import Pte, open_pte
from edge_client.training import Gradient
from edge_client.training.narrowed import Engine


class ExecuTorchTrainer(Engine):
    """See :class:`edge_client.training.Trainer`."""

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        super().__init__(bundle.manifest)
        self._bundle = bundle
        self._threads = threads

    def _program(self, part: str) -> tuple[Pte, int]:
        """The program of `part`, and the most samples of a batch that it runs."""
        program = open_pte(
            self._bundle.part(part).read_bytes(),
            threads=self._threads,
            what=part,
            advice="export the bundle again",
            refused=BundleError,
        )
        place = len(self.manifest.parameters) + len(self.manifest.buffers)
        if len(program.sizes) <= place or not program.sizes[place]:
            raise BundleError(f"{part} has {len(program.sizes)} inputs, not the manifest's; export the bundle again")
        return program, program.sizes[place][0]

    @cached_property
    def _train(self) -> tuple[Pte, int]:
        return self._program("train.pte")

    @cached_property
    def _eval(self) -> tuple[Pte, int]:
        return self._program("eval.pte")

    def _state(self, parameters: F32, buffers: F32) -> list[NDArray[Any]]:
        m = self.manifest
        return [*_arrays(m.parameters, parameters), *_arrays(m.buffers, buffers)]

    def gradient(self, parameters: F32, buffers: F32, x: NDArray[Any], y: NDArray[Any], key: int = 0) -> Gradient:
        if self.manifest.draws:
            raise ConfigError("train.pte holds no dropout; train this bundle with the backend onnxruntime or torch")
        program, most = self._train
        if len(x) > most:
            raise ConfigError(
                f"a batch of {len(x)} samples is more than the {most} that train.pte runs; set a smaller batch, or "
                "export the bundle with --executorch-batch"
            )
        m = self.manifest
        loss, *made = program(*self._state(parameters, buffers), x, y)
        trainable = tuple(t for t in m.parameters if t.trainable)
        into = [*views(trainable, self._gradient).values(), *views(m.buffers, self._statistics).values()]
        for view, value in zip(into, made, strict=True):
            view[...] = value
        return Gradient(float(loss), self._gradient, self._statistics)

    def logits(self, parameters: F32, buffers: F32, x: NDArray[Any]) -> F32:
        program, most = self._eval
        state = self._state(parameters, buffers)
        parts = [program(*state, x[i : i + most])[0] for i in range(0, len(x), most)]
        made: F32 = np.concatenate(parts)
        return made


def _arrays(table: tuple[Tensor, ...], flat: F32) -> list[F32]:
    if not flat.flags.writeable:  # a payload's: torch has no read-only tensors, and one copy is less than many
        flat = flat.copy()
    return list(views(table, flat).values())
