"""A process that forks while it holds what came through shared memory; prints what it saw.

Each line is a scenario's name, and what there was to see in the child and in the parent.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import memmove
from pathlib import Path

import numpy as np

from rpc.transports.host.regions import Array, view_of
from rpc.transports.host.segments import BLOCK, Budget, ReceivedSegments, SendPool, SharedSlot
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers

LENGTH = 3 * BLOCK
LOCKS = (type(threading.Lock()), type(threading.RLock()))

while_forking: list[Callable[[], object]] = []
early_in_parent: list[Callable[[], object]] = []
early_in_child: list[Callable[[], object]] = []


def run_all(actions: list[Callable[[], object]]) -> None:
    for action in actions:
        action()


class Segment:
    """Both ends of one direction between two workers, in this process."""

    def __init__(self) -> None:
        self.pool, self.segments = (
            SendPool(Budget(1 << 30), memmove, "bob", "sockets"),
            ReceivedSegments("alice", "sockets"),
        )
        offer = self.pool.offer(LENGTH)
        assert offer is not None
        self.segments.add(offer.segment, offer.size, offer.descriptor)
        os.close(offer.descriptor)
        self.pool.answered(offer.segment, True)

    def send(self, text: str) -> SharedSlot:
        data = text[0].encode() * LENGTH
        slot = self.pool.put(np.frombuffer(data, np.uint8).ctypes.data, LENGTH)
        assert slot is not None
        return slot

    def receive(self, text: str) -> Array:
        return self.segments.array(*self.send(text), LENGTH)


class Child:
    """A fork of this process that runs ``look`` when it is told to, and tells the outcome."""

    def __init__(self, look: Callable[[], str]) -> None:
        start, begin = os.pipe()
        outcome, tell = os.pipe()
        self._begin, self._outcome = begin, outcome
        self._id = os.fork()
        if not self._id:
            os.read(start, 1)
            os.write(tell, look().encode())
            os._exit(0)
        os.close(start)
        os.close(tell)

    def outcome(self) -> str:
        """Lets it go on, and waits for it."""
        os.write(self._begin, b"x")
        found = os.read(self._outcome, 1000).decode()
        _, status = os.waitpid(self._id, 0)
        os.close(self._begin)
        os.close(self._outcome)
        return found or f"ended with {status}"


def text_in(array: Array) -> str:
    """The letters that the array holds."""
    return "".join(sorted({chr(byte) for byte in view_of(array, LENGTH)}))


def parent_lets_go(segment: Segment) -> str:
    array = segment.receive("old")
    child = Child(lambda: text_in(array))
    del array
    array = segment.receive("new")
    return f"{child.outcome()} {text_in(array)}"


def child_writes(segment: Segment) -> str:
    array = segment.receive("old")

    def write() -> str:
        view_of(array, LENGTH)[:] = b"c" * LENGTH
        return text_in(array)

    return f"{Child(write).outcome()} {text_in(array)}"


def child_lets_go(segment: Segment) -> str:
    held = [segment.receive("old")]

    def drop() -> str:
        held.clear()
        return "dropped"

    outcome = Child(drop).outcome()
    segment.receive("new")
    return f"{outcome} {text_in(held[0])}"


def received_while_forking(segment: Segment) -> str:
    held: list[Array] = []
    while_forking.append(lambda: held.append(segment.receive("old")))
    child = Child(lambda: text_in(held[0]))
    while_forking.clear()
    kept = text_in(held.pop())
    segment.receive("new")
    return f"{child.outcome()} {kept}"


def dropped_while_forking(segment: Segment) -> str:
    held = [segment.receive("old")]
    slot = segment.send("next")
    while_forking.append(held.clear)
    child = Child(lambda: "lives")
    while_forking.clear()
    return f"{child.outcome()} {segment.send('new').position < slot.position}"


def dropped_early_in_child(segment: Segment) -> str:
    held = [segment.receive("old")]
    early_in_child.append(held.clear)
    outcome = Child(lambda: "lives").outcome()
    early_in_child.clear()
    segment.receive("new")
    return f"{outcome} {text_in(held[0])}"


def locked_by_another_thread(segment: Segment) -> str:
    buffers = ReceiveBuffers(1 << 20)
    held = [segment.receive("old"), buffers.take(LENGTH)]
    owners = (buffers, *(array.region for array in held))
    locks = [each for owner in owners for each in vars(owner).values() if type(each) in LOCKS]
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as all_held:
            for lock in locks:
                all_held.enter_context(lock)
            locked.set()
            done.wait()

    def drop() -> str:
        held.clear()
        return "dropped"

    holder = threading.Thread(target=hold)
    while_forking.extend([holder.start, lambda: locked.wait()])
    early_in_parent.extend([done.set, holder.join])
    outcome = Child(drop).outcome()
    while_forking.clear()
    early_in_parent.clear()
    return outcome


def forked_twice(segment: Segment) -> str:
    held = [segment.receive("old")]

    def fork_again() -> str:
        grandchild = Child(lambda: text_in(held[0]))
        view_of(held[0], LENGTH)[:] = b"c" * LENGTH
        return f"{grandchild.outcome()} {text_in(held[0])}"

    child = Child(fork_again)
    held.clear()
    segment.receive("new")
    return child.outcome()


def two_arrays(segment: Segment) -> str:
    first, gap, second = (segment.receive(text) for text in "123")
    del gap
    return Child(lambda: f"{text_in(first)} {text_in(second)}").outcome()


def copies_are_given_back(segment: Segment) -> str:
    array = segment.receive("old")
    before = mapped_bytes()
    for _ in range(20):
        Child(lambda: "x").outcome()
    return f"{mapped_bytes() - before < array.region.size}"


def child_frees_what_it_drops(segment: Segment) -> str:
    held = [segment.receive("old")]
    size = held[0].region.size

    def drop() -> str:
        before = mapped_bytes()
        held.clear()
        return str(before - mapped_bytes() == size)

    return Child(drop).outcome()


def no_room_for_a_copy(segment: Segment) -> str:
    array = segment.receive("old")
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + array.region.size // 2, hard))
    unused, read = Child(lambda: "lives"), Child(lambda: text_in(array))
    outcome = f"{unused.outcome()}, {read.outcome()}, {text_in(array)}"
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return outcome


def mapped_bytes() -> int:
    pages, *_ = Path("/proc/self/statm").read_text().split()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


SCENARIOS = (
    parent_lets_go,
    child_writes,
    child_lets_go,
    received_while_forking,
    dropped_while_forking,
    dropped_early_in_child,
    locked_by_another_thread,
    forked_twice,
    two_arrays,
    copies_are_given_back,
    child_frees_what_it_drops,
    no_room_for_a_copy,
)

if __name__ == "__main__":
    # Python runs hooks of the first kind last come, first served; so all of these run between
    # the project's.
    os.register_at_fork(
        before=lambda: run_all(while_forking),
        after_in_parent=lambda: run_all(early_in_parent),
        after_in_child=lambda: run_all(early_in_child),
    )
    for scenario in SCENARIOS:
        print(scenario.__name__, scenario(Segment()), flush=True)
