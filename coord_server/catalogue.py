"""The installed methods with their settings, as an operator's tool needs them."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint

from pydantic_core import PydanticUndefined, to_jsonable_python

from edge_client.errors import ConfigError
from edge_client.methods import in_a_line, installed_methods, load_method
from edge_client.protocol.operator import MethodSummary

log = logging.getLogger("maskfleet")


def methods() -> list[MethodSummary]:
    """Every method that can be loaded, by name."""
    return [summary for found in installed_methods().values() if (summary := _summary(found)) is not None]


@cache
def _summary(found: EntryPoint) -> MethodSummary | None:
    try:
        method = load_method(found)
    except ConfigError as error:
        log.warning("%s", error)
        return None
    defaults = {name: field.get_default(call_default_factory=True) for name, field in method.model_fields.items()
                if field.default is not PydanticUndefined or field.default_factory is not None}  # fmt: skip
    return MethodSummary(
        name=found.name,
        description=in_a_line(method),
        defaults=to_jsonable_python(defaults),
        settings=method.model_json_schema(),
    )
