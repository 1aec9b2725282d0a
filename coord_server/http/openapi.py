"""Additions to the OpenAPI document that FastAPI writes: two schemas, and an example of every JSON body and answer.

The examples are in `examples.json`, by model. FastAPI does not read manifests, so their schema is added here. What the
document says of a query is held: `documented_query` refuses every other parameter, once the caller is known. Probes
may add a parameter against caches.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from pydantic import BaseModel

from coord_server.http.problems import called, describe
from coord_server.problems import Refusal
from edge_client.bundle import Manifest
from edge_client.errors import suggestion
from edge_client.protocol.changes import AnyChange, Snapshot
from edge_client.protocol.messages import Problem

COMPONENTS = "#/components/schemas/"
MANIFEST_SCHEMA = {"$ref": f"{COMPONENTS}Manifest"}
BYTES = {"schema": {"type": "string", "format": "binary"}}
"""A body of bytes."""
EXAMPLES: dict[str, Any] = json.loads(Path(__file__).with_name("examples.json").read_text())
"""An example of each model; together they tell of device pi-07 in one federation."""


def headers(described: Mapping[str, str]) -> dict[str, Any]:
    """The headers of an answer, by name, as a document has them."""
    return {name: {"description": text, "schema": {"type": "string"}} for name, text in described.items()}


def _schema(model: type[BaseModel]) -> dict[str, Any]:
    """A model's schema and, under their names, those of the models in it."""
    schema = model.model_json_schema(ref_template=f"{COMPONENTS}{{model}}")
    return {**schema.pop("$defs", {}), model.__name__: schema}


def _examples(schema: dict[str, Any], components: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The examples of a schema by name: a model's own, one for each model of a union, a list of one."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(COMPONENTS)
        yield name, EXAMPLES[name]
    elif "oneOf" in schema:
        for choice in schema["oneOf"]:
            yield from _examples(choice, components)
    elif schema.get("type") == "array":
        for name, example in _examples(schema["items"], components):
            yield name, [example]


def _messages(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema and examples of every JSON body and JSON answer."""
    for operations in document["paths"].values():
        for operation in operations.values():
            for message in (operation.get("requestBody", {}), *operation["responses"].values()):
                yield from (said for kind, said in message.get("content", {}).items() if kind == "application/json")


async def documented_query(request: Request) -> None:
    """Refuse a query parameter that the operation lacks, or that is there twice. Raises Refusal.

    FastAPI ignores the one, so that a misspelt filter filters nothing, and takes the last of the others.
    """
    if not request.query_params:
        return
    operation = request.app.openapi()["paths"][request.scope["route"].path_format].get(request.method.lower(), {})
    known = [p["name"] for p in operation.get("parameters", []) if p["in"] == "query"]
    given = [name for name, _ in request.query_params.multi_items()]
    for name in given:
        if name not in known:
            takes = f"the parameters {', '.join(known)}" if known else "no parameters in its query"
            raise Refusal(
                "bad-message", f"{called(request.scope)} takes {takes}, not {name[:40]!r}{suggestion(name, known)}"
            )
        if given.count(name) > 1:
            raise Refusal("bad-message", f"the query has {name!r} {given.count(name)} times; give it once")


def install(app: FastAPI) -> None:
    """Complete the OpenAPI document of `app`, which has all its routes."""
    written = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        document = written()
        for operations in document["paths"].values():
            for operation in operations.values():
                describe(operation)
        components = document["components"]["schemas"]
        for replaced in ("HTTPValidationError", "ValidationError"):
            components.pop(replaced, None)
        for model in (Manifest, Problem, Snapshot, *AnyChange.__args__):
            components |= _schema(model)
        for name, example in EXAMPLES.items():
            components[name]["examples"] = [example]
        for message in _messages(document):
            examples = {name: {"value": value} for name, value in _examples(message["schema"], components)}
            if examples:
                message["examples"] = examples
        return document

    app.openapi = openapi  # type: ignore[method-assign]
