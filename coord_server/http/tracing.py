"""OpenTelemetry by its own packages, the extra `otel`: only when OTEL_EXPORTER_OTLP_ENDPOINT names where spans go."""

from __future__ import annotations

import logging
import os
from importlib import import_module

from fastapi import FastAPI

log = logging.getLogger("maskfleet")


def install(app: FastAPI) -> None:
    """Send a span of each request; the packages read everything else from the environment."""
    if not os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return
    try:
        provider = import_module("opentelemetry.sdk.trace").TracerProvider()
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
        provider.add_span_processor(import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter))
        fastapi = import_module("opentelemetry.instrumentation.fastapi").FastAPIInstrumentor
    except ImportError as error:
        log.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, but no spans are sent: %s; install 'maskfleet[otel]'", error)
        return
    fastapi.instrument_app(app, tracer_provider=provider)
