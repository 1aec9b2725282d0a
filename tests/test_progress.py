"""How far a long run is, in a terminal."""

from __future__ import annotations

import io

import pytest
from edge_bench.progress import Steps
from rich.console import Console


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_of_any_width_shows_the_steps_and_the_time_left(width: int) -> None:
    file = io.StringIO()
    with Steps(Console(file=file, force_terminal=True, color_system=None, width=width), 1200) as steps:
        steps.step("lattice      round  11/1200  loss 0.025  score 0.678, after local epochs 0.994", 11)
    assert "11/1200 -:--:-- left lat" in file.getvalue()
