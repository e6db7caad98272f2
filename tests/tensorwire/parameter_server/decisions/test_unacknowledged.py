"""A trainer keeps a push until it is safe everywhere, and sends again what is not."""

from __future__ import annotations

from tensorwire.parameter_server.decisions.unacknowledged import Unacknowledged


def two_pushes() -> Unacknowledged:
    kept = Unacknowledged()
    kept.add(0, 0, "whole 0", {1: "0 to 1", 2: "0 to 2"})
    kept.add(1, 0, "whole 1", {1: "1 to 1", 2: "1 to 2"})
    return kept


def test_a_push_is_kept_until_every_shard_has_said_that_it_is_safe() -> None:
    kept = two_pushes()
    kept.safe(1, 2)
    assert (len(kept), kept.oldest()) == (2, 0)
    kept.safe(2, 1)
    assert (len(kept), kept.oldest()) == (1, 1)
    kept.safe(2, 2)
    assert (len(kept), kept.oldest()) == (0, None)


def test_a_new_head_is_sent_what_is_not_safe_there_as_it_was() -> None:
    kept = two_pushes()
    kept.safe(1, 1)
    assert kept.again(1) == [(1, 0, "1 to 1")]
    assert kept.again(2) == [(0, 0, "0 to 2"), (1, 0, "1 to 2")]


def test_a_refused_push_is_split_anew_once() -> None:
    kept = two_pushes()
    assert kept.refused(1, 0) == "whole 1"
    kept.add(1, 1, "whole 1", {3: "1 to 3"})
    assert kept.refused(1, 0) is None
    assert kept.again(3) == [(1, 1, "1 to 3")]
    assert kept.again(2) == [(0, 0, "0 to 2")]


def test_what_a_shard_had_that_is_no_more_must_be_split_anew() -> None:
    kept = two_pushes()
    kept.safe(2, 1)
    assert kept.stranded({1}) == [1]
    kept.add(1, 1, "whole 1", {1: "1 to 1"})
    assert kept.stranded({1}) == []
    assert kept.again(1) == [(0, 0, "0 to 1"), (1, 1, "1 to 1")]


def test_a_cluster_that_went_back_is_owed_nothing() -> None:
    kept = two_pushes()
    assert kept.clear() == 2
    assert kept.again(1) == []
