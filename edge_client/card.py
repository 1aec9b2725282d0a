"""The metadata of a personal model's file: where it is from, what goes in, what comes out, its terms of use.

The entries are `metadata_props` of the ONNX file, text by name, so that any tool shows them. Values that are not text
are JSON. `describe` adds them to a file, `read` reads them back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
from pydantic import TypeAdapter, ValidationError

from edge_client.bundle import Input, Manifest
from edge_client.errors import BundleError
from edge_client.files import write_whole
from edge_client.targets import AnyTarget, Target

PREFIX = "maskfleet."
ELSEWHERE = "choose another place for the model"


@dataclass(frozen=True)
class Card:
    """What is needed to run a personal model, and every entry as it stands."""

    input: Input
    target: Target
    class_names: tuple[str, ...]
    entries: Mapping[str, str]


def card(manifest: Manifest, **facts: str | int) -> dict[str, str]:
    """The entries of a model of this bundle; `facts` are further ones, like `federation`. Empty texts are left out."""
    said: dict[str, Any] = {
        "version": version("maskfleet"),
        "model": manifest.name,
        "input": manifest.input.model_dump_json(),
        "target": manifest.target.model_dump_json(),
        "classes": json.dumps(manifest.class_names, ensure_ascii=False) if manifest.class_names else "",
        **facts,
    }
    return {PREFIX + name: str(value) for name, value in said.items() if value != ""}


def describe(path: Path, entries: Mapping[str, str]) -> None:
    """Put the entries into the model at `path`, which changes whole or not at all. Raises StateError."""
    model = onnx.load(path)
    onnx.helper.set_model_props(model, dict(entries))
    write_whole(path, model.SerializeToString(), mode=0o666, elsewhere=ELSEWHERE)


def has_card(entries: Mapping[str, str]) -> bool:
    """Whether the metadata of a model is that of a personal one."""
    return PREFIX + "input" in entries


def read(entries: Mapping[str, str], where: str) -> Card:
    """The card in a model's metadata. Raises BundleError when it is not that of a personal model."""
    lacks = [name for name in ("input", "target") if PREFIX + name not in entries]
    if lacks:
        raise BundleError(
            f"{where} has no entry {PREFIX}{lacks[0]} in its metadata; name a file that `maskfleet join` or "
            "`maskfleet federation export --onnx` wrote"
        )
    try:
        return Card(
            Input.model_validate_json(entries[PREFIX + "input"]),
            TypeAdapter(AnyTarget).validate_json(entries[PREFIX + "target"]),
            TypeAdapter(tuple[str, ...]).validate_json(entries.get(PREFIX + "classes", "[]")),
            {name.removeprefix(PREFIX): text for name, text in entries.items() if name.startswith(PREFIX)},
        )
    except ValidationError as error:
        raise BundleError(
            f"{where}: its metadata is malformed: {error.errors()[0]['msg']}; have it written again"
        ) from None
