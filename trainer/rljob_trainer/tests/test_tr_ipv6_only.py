"""Ranks in a network that has no IPv4 at all, not even on loopback."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tr_ipv6_only import ADDRESS, INTERFACE, enter_ipv6_only

from rljob_trainer.distributed.network import is_local_address

RANKS = Path(__file__).with_name("tr_ipv6_ranks.py")


def test_two_ranks_meet_and_add_up_where_there_is_no_ipv4():
    command = enter_ipv6_only([sys.executable, str(RANKS), ADDRESS])
    # What this machine sets for its own interfaces means nothing in there.
    environment = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = sorted(json.loads(result.stdout.splitlines()[-1]), key=lambda report: report["rank"])
    assert [report["rank"] for report in reports] == [0, 1]
    for report in reports:
        assert report["sum"] == [10.0, 12.0, 14.0, 16.0]
        assert report["interface"] == INTERFACE
        assert report["ipv4_sockets"] == []
        assert report["has_ipv4_loopback"] is False


def test_addresses_of_this_node_are_told_from_others():
    assert is_local_address("127.0.0.1")
    assert not is_local_address("203.0.113.7")  # of a range for documentation
    assert not is_local_address("2001:db8::7")
