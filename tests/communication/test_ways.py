"""Which transfers of a device take turns."""

from __future__ import annotations

from raypipe.communication.ways import ways


def test_peers_behind_one_port_are_one_way() -> None:
    found = ways({1: ["a->b", "out-of-a"], 2: ["a->c", "out-of-a"], 3: ["switch"]})
    assert found[1] == found[2] != found[3]


def test_peers_with_links_of_their_own_are_ways_of_their_own() -> None:
    assert len(set(ways({1: ["a->b"], 2: ["a->c"], 3: [], 4: []}).values())) == 4


def test_a_path_that_shares_links_with_two_others_joins_them() -> None:
    found = ways({1: ["x"], 2: ["y"], 3: ["z"], 4: ["x", "y"]})
    assert found[1] == found[2] == found[4] != found[3]
