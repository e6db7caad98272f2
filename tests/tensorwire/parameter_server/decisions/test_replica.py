"""A server answers for its shard what is so, and no earlier than it is safe."""

from __future__ import annotations

from tensorwire.parameter_server.decisions.clock import Apply, Push, Taken
from tensorwire.parameter_server.decisions.consistency import BSP, Async
from tensorwire.parameter_server.decisions.orders import Copy, Prime
from tensorwire.parameter_server.decisions.replica import (
    Assign,
    Import,
    NotHead,
    Replica,
    Respond,
    Run,
)
from tensorwire.parameter_server.decisions.replication import Forward
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


def test_a_backup_counts_only_when_it_has_what_was_acknowledged_while_it_was_made() -> None:
    me, heir = Server("ps0", 0), Server("ps1", 0)
    it = Replica(me, 0, Async())
    it.rechained(Shard(0, (me,), 1))
    it.ordered(Prime({0: 0}, 0, 0, (0,)), "order")
    it.ordered(Copy(heir), "copy")
    push = Push(0, 0, 0)
    assert Respond("push", Taken(0, 0)) in it.pushed(push, "push")
    assert it.copied(heir) == [Forward(heir, 1, 1, push)]
    assert it.acknowledged(heir, 2) == [Respond("copy", True)]
