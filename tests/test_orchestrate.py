"""docs/orchestrate.py as it stands in the manual, against a real coordinator and two real devices."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from edge_bench.simulation.file import find_bundle
from federation import OPERATOR, PATIENCE, Federation

from edge_client.protocol import payload

pytest.importorskip("sklearn")
EXAMPLE = Path(__file__).parent.parent / "docs" / "orchestrate.py"


def test_the_example_creates_a_federation_watches_its_rounds_and_exports_the_state(tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    token, output = tmp_path / "token", tmp_path / "state.safetensors"
    token.write_text(OPERATOR)
    with Federation(tmp_path / "fed") as fed:
        command = [sys.executable, str(EXAMPLE), fed.url, str(token), str(find_bundle("digits").folder), str(output)]
        example = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert example.stdout is not None
        try:
            line = example.stdout.readline()
            assert line.startswith("join token: "), line + example.stdout.read()
            fed.id, fed.token = "night", line.split()[-1]
            for i, name in enumerate(("pi-1", "pi-2")):
                data = tmp_path / f"{name}.npz"
                part = slice(i * 150, i * 150 + 150)
                np.savez(data, x=(x[part] / 16).astype(np.float32), y=y[part])
                fed.join(name, data)
            said, _ = example.communicate(timeout=PATIENCE)
        finally:
            example.kill()
        assert example.returncode == 0, said
        assert re.findall(r"round (\d): score 0\.\d{3}", said) == ["1", "2", "3"]
        assert output.read_bytes() == fed.state()
        assert payload.decode(output.read_bytes(), payload.FILE_HEADER_BYTES).arrays
