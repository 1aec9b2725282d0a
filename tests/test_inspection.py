"""`payload inspect` explains any payload and refuses anything else; `bundle inspect` is tested in test_cli.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import PayloadError
from edge_client.inspection import payload
from edge_client.protocol.payload import Payload, encode


def test_a_payload_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = Payload({"mask": np.full(4, 0x0F, np.uint8), "head": np.array([1.0, 3.0], np.float32)}, {"round": 7})
    data = encode(content)
    (tmp_path / "update").write_bytes(data)
    payload(tmp_path / "update", 100)
    said = capsys.readouterr().out
    assert f"{len(data)} bytes: 12 in 2 arrays, {len(data) - 12} of header" in said
    assert f"{8 * len(data) / 100:.4f} bits for each of 100 parameters" in said
    assert "50.0% of the bits" in said
    assert "mean 2" in said
    assert "round" in said


def test_other_bytes_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"PNG....")
    with pytest.raises(PayloadError, match="not a maskfleet payload"):
        payload(tmp_path / "other")
    with pytest.raises(PayloadError, match="cannot read"):
        payload(tmp_path / "none")
