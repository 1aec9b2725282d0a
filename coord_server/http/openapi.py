"""Additions to the OpenAPI document that FastAPI writes: two schemas, and an example of every JSON body and answer.

The examples are the models' own (`edge_client/protocol/messages.py`). FastAPI does not read manifests, so their schema
and example are here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from coord_server.http.problems import describe
from edge_client.bundle import Manifest
from edge_client.protocol.messages import Problem

COMPONENTS = "#/components/schemas/"
MANIFEST_SCHEMA = {"$ref": f"{COMPONENTS}Manifest"}
MANIFEST_EXAMPLE: dict[str, Any] = {
    "format": 1,
    "name": "har-mlp",
    "input": {"shape": [1152], "dtype": "float32"},
    "target": {"kind": "classification", "classes": 6, "loss": "cross_entropy"},
    "parameters": [
        {"name": "0.weight", "shape": [100, 1152], "offset": 0, "init": {"kind": "uniform", "scale": 0.0722}},
        {"name": "0.bias", "shape": [100], "offset": 115200, "init": {"kind": "constant", "scale": 0.0}},
        {"name": "2.weight", "shape": [6, 100], "offset": 115300, "init": {"kind": "uniform", "scale": 0.2449}},
        {"name": "2.bias", "shape": [6], "offset": 115900, "init": {"kind": "constant", "scale": 0.0}},
    ],
    "layers": [
        {"name": "0", "kind": "linear", "weights": ["0.weight"], "biases": ["0.bias"]},
        {"name": "2", "kind": "linear", "weights": ["2.weight"], "biases": ["2.bias"]},
    ],
    "groups": [
        {
            "name": "0",
            "size": 100,
            "producers": [{"kind": "linear", "weight": "0.weight", "bias": "0.bias"}],
            "ops": [{"kind": "relu"}],
            "consumers": [{"kind": "linear", "weight": "2.weight", "bias": "2.bias"}],
        }
    ],
    "seed": 1,
    "parts": {
        "eval.onnx": {"sha256": "c41f8e02" * 8, "size": 1874},
        "train.onnx": {"sha256": "08d7b35a" * 8, "size": 5127},
    },
}
"""A perceptron of two layers, its weights drawn from a seed."""


def _schema(model: type[Manifest] | type[Problem]) -> dict[str, Any]:
    """A model's schema and, under their names, those of the models in it."""
    schema = model.model_json_schema(ref_template=f"{COMPONENTS}{{model}}")
    return {**schema.pop("$defs", {}), model.__name__: schema}


def _examples(schema: dict[str, Any], components: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The examples of a schema by name: a model's own, one for each model of a union, a list of one."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(COMPONENTS)
        fields, example = components[name]["properties"], components[name]["examples"][0]
        yield name, {field: example[field] for field in fields if field in example}  # in the order of the model
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
        components |= {**_schema(Manifest), **_schema(Problem)}
        components["Manifest"]["examples"] = [MANIFEST_EXAMPLE]
        for message in _messages(document):
            examples = {name: {"value": value} for name, value in _examples(message["schema"], components)}
            if examples:
                message["examples"] = examples
        return document

    app.openapi = openapi  # type: ignore[method-assign]
