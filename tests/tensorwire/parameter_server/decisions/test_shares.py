"""A server keeps what views say, but for those that are older than what it has."""

from __future__ import annotations

from dataclasses import replace

from tensorwire.parameter_server.decisions import shares, view_changes
from tensorwire.parameter_server.decisions.views import Server

A, B, C = (Server(f"ps{k}", 0) for k in range(3))
ONE = view_changes.first([A], 1, {})
"""A cluster of one shard, which server A keeps."""


def test_a_server_gives_up_what_a_view_gives_to_others() -> None:
    view = view_changes.backed_up(ONE, 0, B)
    assert shares.of(view, B) == {0: view.shards[0]}
    assert shares.given_up(view, B, {0: 1}, ()) == []
    assert shares.given_up(view_changes.without(view, {B}), B, {0: 1}, ()) == [0]


def test_a_copy_that_no_view_names_yet_is_kept_until_its_shard_is_no_more() -> None:
    assert shares.given_up(ONE, B, {0: 0}, {0}) == []
    again = view_changes.rolled_back(ONE, [C])
    assert shares.given_up(again, B, {0: 0}, {0}) == [0]


def test_a_view_that_is_older_than_a_copy_says_nothing_of_it() -> None:
    """The copy would be gone, and the head would wait for its acknowledgements for ever."""
    before, after = ONE, view_changes.rolled_back(ONE, [A])
    (shard,) = after.shards
    assert shares.given_up(before, B, {shard.number: shard.version}, {shard.number}) == []
    later = replace(view_changes.backed_up(before, 0, C), number=5)
    assert shares.given_up(later, B, {0: 4}, ()) == []
    assert shares.given_up(later, B, {0: 1}, ()) == [0]
