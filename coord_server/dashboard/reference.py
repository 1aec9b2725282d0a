"""`/docs`: the API's reference as one page, from the OpenAPI document; nothing is fetched from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from markupsafe import Markup, escape

Schema = Mapping[str, Any]


@dataclass(frozen=True)
class Field:
    """A parameter of a call, or a field of a message; `place` is where a parameter goes ("path", "query", "header")."""

    name: str
    place: str
    kind: Markup
    required: bool
    what: str


@dataclass(frozen=True)
class Answer:
    """One status of a call's answers."""

    status: str
    what: str
    kinds: Markup


@dataclass(frozen=True)
class Call:
    """One operation. `token` is whose bearer token it needs, "" for none."""

    id: str
    method: str
    path: str
    what: str
    token: str
    parameters: list[Field]
    body: Markup
    answers: list[Answer]


@dataclass(frozen=True)
class Model:
    """One JSON message with an example."""

    name: str
    what: str
    fields: list[Field]
    example: str


def of(app: FastAPI) -> dict[str, Any]:
    """What the page shows: the document's title and words, calls by tag, and models by name."""
    document = app.openapi()
    calls: dict[str, list[Call]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            calls.setdefault(operation["tags"][0], []).append(_call(path, method, operation))
    models = [_model(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return {"info": document["info"], "calls": calls, "models": models}


def _call(path: str, method: str, operation: Schema) -> Call:
    security = operation.get("security", [])
    return Call(
        id=operation["operationId"],
        method=method.upper(),
        path=path,
        what=operation.get("description", ""),
        token=" or ".join(name for one in security for name in one),
        parameters=[_parameter(p) for p in operation.get("parameters", [])],
        body=_content(operation.get("requestBody", {})),
        answers=[_answer(status, answer) for status, answer in operation["responses"].items()],
    )


def _parameter(p: Schema) -> Field:
    what = p.get("description") or p["schema"].get("description", "")
    return Field(p["name"], p["in"], _kind(p["schema"]), p.get("required", False), what)


def _answer(status: str, answer: Schema) -> Answer:
    problems = answer.get("content", {}).get("application/problem+json", {}).get("examples", {})
    kinds = Markup(", ").join(Markup("<code>{}</code>").format(kind) for kind in problems)
    return Answer(status, answer.get("description", ""), kinds or _content(answer))


def _content(message: Schema) -> Markup:
    """The kinds of a body, each with its media type when it is not JSON."""
    found = []
    for media, content in message.get("content", {}).items():
        kind = _kind(content.get("schema", {}))
        found.append(kind if media == "application/json" else Markup("{} ({})").format(kind, media))
    return Markup(" or ").join(found)


def _kind(schema: Schema) -> Markup:
    """A schema in words; models are links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    for key in ("oneOf", "anyOf"):
        if key in schema:
            return Markup(" or ").join(_kind(choice) for choice in schema[key])
    if "const" in schema:
        return escape(json.dumps(schema["const"]))
    if "enum" in schema:
        return Markup(", ").join(escape(json.dumps(value)) for value in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return Markup("list of {}").format(_kind(schema.get("items", {})))
    if kind == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return Markup("by name: {}").format(_kind(schema["additionalProperties"]))
    if schema.get("format") == "binary":
        return Markup("bytes")
    return escape(f"{kind}{_range(schema)}")


def _range(schema: Schema) -> str:
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    if high is None:
        high = schema.get("exclusiveMaximum")
    if low is None and high is None:
        return ""
    if high is None or high >= 2**53:
        return f" from {low:g}" if low is not None else ""
    return f", at most {high:g}" if low is None else f" {low:g} .. {high:g}"


def _model(name: str, schema: Schema) -> Model:
    required = schema.get("required", [])
    fields = [
        Field(field, "", _kind(of_field), field in required, _field(of_field))
        for field, of_field in schema.get("properties", {}).items()
    ]
    examples = schema.get("examples") or [None]
    example = "" if examples[0] is None else json.dumps(examples[0], indent=2, ensure_ascii=False)
    return Model(name, schema.get("description", ""), fields, example)


def _field(schema: Schema) -> str:
    default = schema.get("default")
    said = schema.get("description", "")
    given = "" if default in (None, [], {}, "") else f"default {json.dumps(default)}"
    return "; ".join(part for part in (said, given) if part)
