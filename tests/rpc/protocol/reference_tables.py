"""Tables of references for several test files, and what they exchange."""

from __future__ import annotations

from rpc.ids import GlobalId, Life
from rpc.protocol.reference_terms import (
    Carrier,
    Effect,
    Handle,
    Send,
    UserHandle,
)
from rpc.protocol.references import ReferenceTable
from rpc.wire.control import (
    ControlMessage,
    Passed,
)

OWNER, ALICE, BOB, CAROL = Life(0, 0), Life(1, 0), Life(2, 0), Life(3, 0)


def table(life: Life) -> ReferenceTable:
    return ReferenceTable(life.worker, life.incarnation)


def id_of(life: Life, counter: int) -> GlobalId:
    return GlobalId(life.worker, life.incarnation, counter)


def share(
    sender: ReferenceTable, handle: Handle, to: Life, carrier: Carrier = Carrier.REQUEST
) -> Passed:
    passed = sender.share(handle, to, carrier)
    assert isinstance(passed, Passed)
    return passed


def receive(receiver: ReferenceTable, passed: Passed) -> UserHandle:
    handle, _ = receiver.receive(passed)
    assert isinstance(handle, UserHandle)
    return handle


def sent(effects: list[Effect]) -> list[ControlMessage]:
    return [effect.message for effect in effects if isinstance(effect, Send)]
