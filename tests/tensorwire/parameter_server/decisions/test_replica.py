"""What one server answers for its shard."""

from __future__ import annotations

from tensorwire.parameter_server.decisions.clock import Apply, Push
from tensorwire.parameter_server.decisions.consistency import BSP
from tensorwire.parameter_server.decisions.orders import Prime
from tensorwire.parameter_server.decisions.replica import NotHead, Replica, Respond, Run
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
