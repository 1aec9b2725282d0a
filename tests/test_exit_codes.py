"""The exit codes, their page and the systemd unit say the same."""

from __future__ import annotations

from pathlib import Path

from edge_client.exit_codes import MEANING, ExitCode


def test_the_page_of_exit_codes_lists_exactly_the_codes_there_are() -> None:
    page = (Path(__file__).parent.parent / "docs" / "exit-codes.md").read_text()
    rows = {
        int(line.split("|")[1]): line.split("|")[2].strip()
        for line in page.splitlines()
        if line[:3].strip("| ").isdigit()
    }
    assert rows == {int(code): text for code, text in MEANING.items()}
