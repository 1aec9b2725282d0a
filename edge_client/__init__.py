"""What runs on a device: protocol, methods, training, client. Needs neither PyTorch nor a compiler.

    from edge_client import Bundle, Client, Method

Importing the package is cheap: each name is loaded from its module at its first use.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_client.bundle import Bundle as Bundle
    from edge_client.data import DeviceData as DeviceData
    from edge_client.device.client import Client as Client
    from edge_client.device.client import Result as Result
    from edge_client.errors import MaskfleetError as MaskfleetError
    from edge_client.methods import Method as Method
    from edge_client.methods import make_method as make_method

# Unless this is set when it starts, ONNX Runtime (from 1.29 on) sends its makers an account of every session.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOME = {
    "Bundle": "bundle",
    "Client": "device.client",
    "DeviceData": "data",
    "MaskfleetError": "errors",
    "Method": "methods",
    "Result": "device.client",
    "make_method": "methods",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
