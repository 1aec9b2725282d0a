"""A table as TOML text: what `tomllib` reads, written back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import date, time
from typing import Any


def dumps(table: Mapping[str, Any], path: tuple[str, ...] = ()) -> str:
    """Values first, then the tables in it; keys whose value is None are left out."""
    values = {k: v for k, v in table.items() if v is not None and not isinstance(v, Mapping)}
    tables = {k: v for k, v in table.items() if isinstance(v, Mapping)}
    head = [f"[{'.'.join(map(_key, path))}]"] if path and (values or not tables) else []
    text = "\n".join([*head, *(f"{_key(k)} = {inline(v)}" for k, v in values.items())])
    return (
        "\n\n".join([*([text] if text else []), *(dumps(v, (*path, k)).rstrip("\n") for k, v in tables.items())]) + "\n"
    )


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if plain else json.dumps(name, ensure_ascii=False).replace("\x7f", "\\u007f")


def inline(value: Any) -> str:
    """A value as it stands behind `=`. JSON's form is TOML's for texts, whole numbers and truth values."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, date | time):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
