"""The operator's dashboard at `/` and the API's reference at `/docs`: pages rendered here, every asset in this package.

session    the signed cookie and the forms' token
routes     pages and commands over HTTP
answers    HTML answers: templates, headers, compression, errors as pages
view       one federation gathered for its page
history    its closed rounds
devices    its devices as rows
plots      SVG
words      figures in words
reference  `/docs` from the OpenAPI document

The pages work without a script; `assets/live.js` keeps them up to date.
"""

from __future__ import annotations

from fastapi import FastAPI

from coord_server.dashboard import answers, routes
from coord_server.dashboard.history import Histories

__all__ = ["install"]


def install(app: FastAPI) -> None:
    """Add the pages to `app`, which has all its other routes and handlers."""
    app.state.histories = Histories()
    app.include_router(routes.router, include_in_schema=False)
    answers.install(app)
