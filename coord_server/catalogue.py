"""The installed methods with their settings, as an operator's tool needs them."""

from __future__ import annotations

import inspect
import logging
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from pydantic_core import PydanticUndefined, to_jsonable_python

from edge_client.methods import Method
from edge_client.protocol.operator import MethodSummary

log = logging.getLogger("maskfleet")


def methods() -> list[MethodSummary]:
    """Every method that can be loaded, by name."""
    found = (_summary(e) for e in sorted(entry_points(group="maskfleet.methods"), key=lambda e: e.name))
    return [summary for summary in found if summary is not None]


@cache
def _summary(found: EntryPoint) -> MethodSummary | None:
    try:
        method: type[Method] = found.load()
    except Exception as error:  # code of another package may fail in any way
        log.warning("method %r cannot be loaded (%s); install its package anew", found.name, error)
        return None
    defaults = {name: field.get_default(call_default_factory=True) for name, field in method.model_fields.items()
                if field.default is not PydanticUndefined or field.default_factory is not None}  # fmt: skip
    return MethodSummary(
        name=found.name,
        description=_line(method),
        defaults=to_jsonable_python(defaults),
        settings=method.model_json_schema(),
    )


def _line(method: type[Method]) -> str:
    """The first sentence of the method's module, else of its class, in one line."""
    text = inspect.getdoc(sys.modules[method.__module__]) or inspect.getdoc(method) or ""
    return " ".join(text.partition("\n\n")[0].split())
