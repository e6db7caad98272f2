"""A server answers for its shard what is so, and no earlier than it is safe."""

from __future__ import annotations

from tensorwire.parameter_server.decisions.consistency import BSP, Async
from tensorwire.parameter_server.decisions.leases import LEASE, Renewal
from tensorwire.parameter_server.decisions.orders import Copy, Prime
from tensorwire.parameter_server.decisions.pushes import Apply, Push, PushKind, Taken
from tensorwire.parameter_server.decisions.reads import AT_ONCE, Pull
from tensorwire.parameter_server.decisions.records import (
    Assign,
    Counted,
    Effect,
    Import,
    NotHead,
    Read,
    Respond,
    Run,
    Safe,
)
from tensorwire.parameter_server.decisions.replica import Replica
from tensorwire.parameter_server.decisions.replication import Fenced, Forward
from tensorwire.parameter_server.decisions.samples import Account, Batches, Deal
from tensorwire.parameter_server.decisions.views import Server, Shard


def test_a_push_that_comes_before_its_shard_was_told_where_to_begin_is_sent_again() -> None:
    """It is not refused as a stranger's: one who finishes would take that for the end."""
    me = Server("ps0", 0)
    it = Replica(me, 0, BSP())
    it.rechained(Shard(0, (me,), 1))
    push = Push(0, 0, 0)
    assert it.pushed(push, "call") == [Respond("call", NotHead())]
    it.ordered(Prime({0: 0}, 0, 0, (0,)), "order")
    assert Run(Apply((push,), 1)) in it.pushed(push, "call")


def test_values_are_not_set_before_what_they_replace_is_here() -> None:
    """They would be lost when it comes."""
    me = Server("ps1", 0)
    it = Replica(me, 1, Async())
    it.rechained(Shard(1, (me,), 1))
    assert it.assigned(Assign("values"), "call") == [Respond("call", NotHead())]
    it.ordered(Prime({}, 0, 1, (0, 1), awaited=frozenset({0})), "order")
    assert it.assigned(Assign("values"), "call") == [Respond("call", NotHead())]
    it.imported(Import(0, 1, "rows"), "import")
    assert Run(Assign("values")) in it.assigned(Assign("values"), "call")


def test_an_account_of_samples_is_told_by_the_head_once_it_is_safe() -> None:
    """One that is lost with the head would name batches that others are given."""
    me, backup = Server("ps0", 0), Server("ps1", 0)
    it = Replica(me, 0, BSP())
    it.rechained(Shard(0, (me, backup), 1))
    assert it.counted("a", "early") == [Respond("early", NotHead())]
    it.ordered(Prime({0: 0}, 0, 0, (0,), accounts={"a": Account().dealt([0])}), "order")
    it.acknowledged(backup, 1, 1)
    it.pushed(Push(0, 0, 0, PushKind.SKIP, None, Batches("a", 1, (0, 1))), "push")
    assert it.counted("a", "call") == []
    account = Account(((0, 2),), Deal(1, (0,), ()))
    assert Respond("call", Counted(account, 1)) in it.acknowledged(backup, 2, 1)
    assert it.counted("b", "call") == [Respond("call", None)]
    it.rechained(Shard(0, (backup, me), 2))
    assert it.counted("a", "late") == [Respond("late", NotHead())]


def test_a_copy_is_no_head_as_an_earlier_view_says_that_its_server_was_one() -> None:
    """That view came late; the shard has another head by now, which made the copy."""
    me, head = Server("ps0", 0), Server("ps1", 0)
    it = Replica(me, 0, Async(), position=7, version=4)
    assert it.rechained(Shard(0, (me,), 2)) == []
    assert not it.is_head
    it.rechained(Shard(0, (me, head), 5))
    assert it.is_head


def test_a_backup_counts_only_when_it_has_what_was_acknowledged_while_it_was_made() -> None:
    me, heir = Server("ps0", 0), Server("ps1", 0)
    it = Replica(me, 0, Async())
    it.rechained(Shard(0, (me,), 1))
    it.ordered(Prime({0: 0}, 0, 0, (0,)), "order")
    it.ordered(Copy(heir), "copy")
    push = Push(0, 0, 0)
    assert Respond("push", Taken(0, 0)) in it.pushed(push, "push")
    assert it.copied(heir) == [Forward(heir, 1, 1, push)]
    assert it.acknowledged(heir, 2, 1) == [Respond("copy", True)]


A, B, C = (Server(f"ps{k}", 0) for k in range(3))
_PULL = Pull(AT_ONCE, 0, "pull")


def primed(me: Server, *chain: Server) -> Replica:
    """A replica of a chain that has taken its first record, which is safe."""
    it = Replica(me, 0, Async())
    it.rechained(Shard(0, chain, 1))
    if me == chain[0]:
        it.ordered(Prime({0: 0}, 0, 0, (0,)), "order")
        it.acknowledged(chain[-1], 1, 1)
    return it


def is_answered(effects: list[Effect]) -> bool:
    return any(isinstance(each, Read) for each in effects)


def test_the_head_of_a_chain_answers_no_pull_before_its_backups_say_that_it_is_still_head() -> None:
    it = primed(A, A, B)
    renewal = Forward(B, 1, 1, Renewal())
    assert it.pulled(_PULL, 0.0) == [renewal]
    assert is_answered(it.acknowledged(B, 2, 1))
    assert is_answered(it.pulled(_PULL, LEASE / 4))


def test_a_lease_counts_from_when_it_was_asked_for_and_not_from_when_the_answer_is_read() -> None:
    it = primed(A, A, B)
    it.pulled(_PULL, 0.0)
    after_a_sleep = 5 * LEASE
    it.acknowledged(B, 2, 1)
    assert not is_answered(it.pulled(_PULL, after_a_sleep))
    assert is_answered(it.acknowledged(B, 3, 1))


def test_whoever_wakes_before_it_reads_the_answer_asks_once_more() -> None:
    it = primed(A, A, B)
    it.pulled(_PULL, 0.0)
    assert it.pulled(_PULL, 5 * LEASE) == [Forward(B, 1, 2, Renewal())]
    assert not is_answered(it.acknowledged(B, 2, 1))
    assert is_answered(it.acknowledged(B, 3, 1))


def test_pulls_do_not_wait_while_a_lease_is_renewed_in_time() -> None:
    it = primed(A, A, B)
    it.pulled(_PULL, 0.0)
    it.acknowledged(B, 2, 1)
    renewed = it.pulled(_PULL, 0.75 * LEASE)
    assert is_answered(renewed)
    assert Forward(B, 1, 2, Renewal()) in renewed


def test_a_head_without_backups_asks_nobody() -> None:
    it = primed(A, A)
    assert is_answered(it.pulled(_PULL, 0.0))
    assert is_answered(it.pulled(_PULL, 9 * LEASE))


def test_what_a_replaced_head_sent_too_early_is_refused_and_not_called_safe() -> None:
    it = primed(B, A, B)
    assert it.received(1, 1, Renewal(), "early") == []
    assert it.rechained(Shard(0, (B,), 2)) == [Respond("early", Fenced(2))]
    done = it.ordered(Prime({0: 0}, 0, 0, (0,)), "order") + it.pulled(_PULL, 0.0)
    assert not any(isinstance(each, Respond) and isinstance(each.answer, Safe) for each in done)
