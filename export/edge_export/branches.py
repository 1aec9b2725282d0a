"""The symbol that stands for the number of samples while a module is traced, and the branches taken on it.

A branch that Python takes on a symbol is taken once, for the traced batch. PyTorch notes the condition as a guard, and
the graph is right only where the guard holds. So a guard that does not hold for every number of samples is a refusal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves
from torch.utils._sympy.functions import Max, Min

from edge_client.errors import ModelError

_DEPTH = 12  # frames between the choice of a convolution's kernel and the evaluation of its condition: five


class BatchEnv(ShapeEnv):
    """Sizes by symbol. The choice among kernels of one convolution leaves no guard, as all of them compute the same."""

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        """As PyTorch's; a guard of a convolution would hide a later one of the module that it implies."""
        if not _chooses_a_convolution():
            return super().evaluate_expr(*args, **kwargs)
        with self.suppress_guards():
            return super().evaluate_expr(*args, **kwargs)


def _chooses_a_convolution() -> bool:
    frame = sys._getframe(2)
    for _ in range(_DEPTH):
        code = frame.f_code
        if code.co_name == "conv" and code.co_filename.endswith("fake_impls.py"):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def refuse_branches(inputs: Iterable[Any]) -> None:
    """Raise ModelError when tracing `inputs` took a branch that other numbers of samples would not take."""
    envs = {id(n.node.shape_env): n.node.shape_env for t in tree_leaves(inputs) for n in t.shape if type(n) is SymInt}
    for env in envs.values():
        for guard in env.guards:
            condition = env.simplify(guard.expr)
            if not _always(condition):
                names = {s: sympy.Symbol("n") for s in condition.free_symbols}
                raise ModelError(
                    f"the forward pass branches on the number of samples n and holds only where "
                    f"{condition.xreplace(names)}; compute the same for every n, with tensor operators"
                )


def _always(condition: Any) -> bool:
    """Whether `condition` holds for every number of samples from two on; a batch of one is proved by itself."""
    more = {s: sympy.Symbol(s.name, integer=True, positive=True) + 1 for s in condition.free_symbols}
    plain = condition.xreplace(more).replace(Max, sympy.Max).replace(Min, sympy.Min)
    return bool(plain == sympy.true)
