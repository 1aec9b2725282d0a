"""The exit codes, their page and the systemd unit say the same."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

import pytest

from edge_client import errors
from edge_client.commands.exit_codes import ASKED_FOR, RESTARTED, ExitCode, exit_code
from edge_client.errors import MaskfleetError

FINAL = frozenset(ExitCode) - RESTARTED - ASKED_FOR - {ExitCode.DONE}  # what only a person can change
DOCS = Path(__file__).parent.parent / "docs"


def test_the_page_of_exit_codes_lists_exactly_the_codes_there_are() -> None:
    page = (DOCS / "exit-codes.md").read_text()
    rows = {
        int(line.split("|")[1]): line.split("|")[2].strip()
        for line in page.splitlines()
        if line[:3].strip("| ").isdigit()
    }
    assert sorted(rows) == sorted(ExitCode)
    assert all(rows.values())


def test_the_page_has_advice_for_every_code_and_says_which_are_restarted() -> None:
    page = (DOCS / "exit-codes.md").read_text().partition("## What to do")[2]
    advice = [line.partition("**")[2].partition("**")[0] for line in page.splitlines() if line.startswith("- **")]
    assert sorted(int(code) for codes in advice for code in codes.split(", ")) == sorted(ExitCode)
    assert f"restarts after {', '.join(str(int(c)) for c in sorted(RESTARTED))}" in page


def test_the_systemd_unit_restarts_what_a_restart_can_mend_and_nothing_else() -> None:
    unit = ConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((DOCS / "devices.md").read_text().partition("```ini\n")[2].partition("```")[0])
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    assert {int(code) for code in service["RestartPreventExitStatus"].split()} == FINAL
    assert {int(code) for code in service["SuccessExitStatus"].split()} == ASKED_FOR


def test_no_code_is_both_restarted_and_asked_for() -> None:
    assert not RESTARTED & ASKED_FOR
    assert ExitCode.DONE not in RESTARTED | ASKED_FOR


@pytest.mark.parametrize(
    "kind", [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, MaskfleetError)]
)
def test_every_error_has_a_code_of_its_own_kind(kind: type[MaskfleetError]) -> None:
    error = kind.__new__(kind)
    assert (exit_code(error) == ExitCode.INTERNAL) == (kind is MaskfleetError)
