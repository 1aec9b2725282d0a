"""What maskfleet asks of every method, and what this one refuses."""

import pytest
from edge_bench.testing import check_method

from edge_client.errors import ConfigError
from edge_client.methods import make_method


def test_it_keeps_the_contract_of_a_method() -> None:
    check_method(make_method({"name": "mine", "epochs": 1}))


def test_a_share_above_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="share"):
        make_method({"name": "mine", "share": 2.0})
