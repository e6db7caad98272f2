"""The server process: its clusters, its memory, its helpers; ``serve``."""

from __future__ import annotations

import contextvars
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

import rpc
from rpc import extend
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.samples import size
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.declarations.arguments import whole
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.confirming import confirmed
from tensorwire.parameter_server.messaging.messages import Message
from tensorwire.parameter_server.messaging.settings import Meeting
from tensorwire.parameter_server.metrics import text_of
from tensorwire.parameter_server.opaque import Json, Response
from tensorwire.parameter_server.server import available
from tensorwire.parameter_server.server.available import Claim
from tensorwire.parameter_server.server.facts import facts_of
from tensorwire.parameter_server.server.loading import load_kernels
from tensorwire.parameter_server.server.node import Node, _turned_away
from tensorwire.parameter_server.server.shard import Call, ShardServer

_logger: Final = logging.getLogger("tensorwire")
_SECONDS_BETWEEN_TRIES: Final = 0.1
_SECONDS_TO_CONFIRM: Final = 2.0


def host() -> Host:
    """The current worker as a server."""
    return extend.worker_state(Host, lambda: Host(extend.worker()), Host.close, Host.leave)


class Host:
    """One worker as a server.

    Args:
        worker: the worker.
    """

    def __init__(self, worker: extend.Worker) -> None:
        self.worker = worker
        self.memory: int | None = None
        self.device: torch.device | None = None
        self._born = time.monotonic()
        self._nodes: dict[str, Node] = {}
        self._reserved: dict[tuple[str, int, int], Claim] = {}
        self._lock = threading.Lock()
        self._context = contextvars.copy_context()
        self._timers: set[threading.Timer] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._forget = worker.on_membership(self._heard)
        self._tell_no_more = worker.progress.add_source("parameter server", self._facts)

    def node(self, cluster: str) -> Node:
        """This server's part in a cluster."""
        with self._lock:
            node = self._nodes.get(cluster)
            if node is None:
                node = self._nodes[cluster] = Node(self, cluster)
                if self._closed.is_set():
                    node.close()
        return node

    def take(
        self,
        cluster: str,
        incarnation: int,
        future: torch.futures.Future[Response],
        message: Message,
    ) -> None:
        """Takes a message."""
        call = Call(future)
        if incarnation != self.worker.life.incarnation or self._closed.is_set():
            call.answer(_turned_away(message))
        else:
            self.node(cluster).handle(call, message)

    def leave(self) -> None:
        """Turns everybody away, and gives up what it asked of others.

        Servers that leave at the same moment may have asked each other what none of them will
        answer any more, such as for a vote.
        """
        with self._lock:
            self._closed.set()
            nodes = list(self._nodes.values())
        for node in nodes:
            node.close()

    def close(self) -> None:
        """Ends what runs here."""
        self.leave()
        self._forget()
        self._tell_no_more()
        with self._lock:
            timers, threads = list(self._timers), list(self._threads)
        for timer in timers:
            timer.cancel()
        for thread in [*timers, *threads]:
            if thread is not threading.current_thread():
                thread.join(10)

    def _heard(self, event: extend.MembershipEvent) -> None:
        server = Server(event.worker.name, event.incarnation)
        with self._lock:
            nodes = list(self._nodes.values())
        for node in nodes:
            if event.change in (extend.MembershipChange.LOST, extend.MembershipChange.LEFT):
                node.heard_lost(server)
            else:
                node.heard_came(server)

    # --- helpers

    def start(self, work: Callable[[], None]) -> None:
        """Runs something long on a thread of its own."""
        context = self._context.copy()

        def run() -> None:
            try:
                context.run(work)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="tensorwire-ps", daemon=True)
        with self._lock:
            if self._closed.is_set():
                return
            self._threads.add(thread)
            thread.start()

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        """Runs something after a time."""
        context = self._context.copy()

        def run() -> None:
            with self._lock:
                self._timers.discard(timer)
            if not self._closed.is_set():
                context.run(work)

        timer = threading.Timer(seconds, run)
        timer.daemon = True
        with self._lock:
            if self._closed.is_set():
                return
            self._timers.add(timer)
            timer.start()

    # --- memory

    def take_room(self, push: Claim, shard: ShardServer) -> str:
        """Takes room for a push; returns why there is none, or an empty text.

        The shard knows afterwards how much is left.
        """
        with self._lock:
            kept = self._reserved.get(push.place)
            if kept is not None and push.number >= kept.number:
                del self._reserved[push.place]
        if not push.bytes:
            return ""
        free = self._free(push)
        shard.room = max(0, free - push.bytes)
        return "" if push.bytes <= free else self._no_room(free, push.bytes)

    def reserve(self, push: Claim) -> str:
        """Keeps room for a push; returns why not, or nothing."""
        free = self._free(push)
        if push.bytes > free:
            return self._no_room(free, push.bytes)
        with self._lock:
            self._reserved[push.place] = push
        return ""

    def give_room_back(self, cluster: str, shard: int, trainer: int) -> None:
        """Gives back the room of a trainer that was lost."""
        with self._lock:
            self._reserved.pop((cluster, shard, trainer), None)

    def _free(self, push: Claim) -> int:
        """The bytes that are left for a push, beside those that are kept for others."""
        with self._lock:
            others = sum(c.bytes for place, c in self._reserved.items() if place != push.place)
            shards = [s for node in self._nodes.values() for s in node.shards.values()]
        if self.memory is None:
            return available.bytes_free(self.device) - others
        return self.memory - others - sum(shard.state.bytes for shard in shards)

    def _no_room(self, free: int, wanted: int) -> str:
        name = self.worker.info.name
        return f"server {name!r} has {max(free, 0)} bytes left, and a push may need {wanted}"

    def describe(self, node: Node) -> dict[str, Json]:
        """All that this server can say of itself."""
        with self._lock:
            shards = dict(node.shards)
        return {
            "server": self.worker.info.name,
            "age": time.monotonic() - self._born,
            "shards": {number: _described(shard) for number, shard in shards.items()},
        }

    def _facts(self) -> dict[str, Json]:
        with self._lock:
            nodes = dict(self._nodes)
        return facts_of(nodes)

    def describe_all(self) -> dict[str, dict[str, Json]]:
        """Returns all that this server can say of itself, by cluster."""
        with self._lock:
            nodes = dict(self._nodes)
        return {name: self.describe(node) for name, node in nodes.items()}

    # --- coming back

    def announce(self) -> None:
        """Tells clusters that name this server that it is there; they may have missed it."""
        meeting = Meeting(self.worker)
        for cluster in meeting.clusters():
            log = extend.WaitLog(time.monotonic())
            while not self._closed.is_set():
                view = meeting.view(cluster)
                if view is None or self._is_known(view) or self._arrives(cluster, view, log):
                    break
                self._closed.wait(_SECONDS_BETWEEN_TRIES)

    def _is_known(self, view: View) -> bool:
        me = Server(self.worker.info.name, self.worker.life.incarnation)
        named = me.name in view.settings.get("servers", ())
        is_meant = named or me.is_of(view.settings.get("role", ""))
        return bool(view.broken) or me in view.servers or not is_meant

    def _arrives(self, cluster: str, view: View, log: extend.WaitLog) -> bool:
        try:
            view = confirmed(self.worker, cluster, view, _SECONDS_TO_CONFIRM)
        except TimeoutError as error:
            if log.is_due(time.monotonic()):
                _logger.warning("server %r asks again: %s", self.worker.info.name, error)
            return False
        node = self.node(cluster)
        with node.acting():
            node.see(view)
        done = threading.Event()
        answers: list[object] = []

        def answered(answer: object) -> None:
            answers.append(answer)
            done.set()

        ask = messages.Asking(orders.Arrive(node.me))
        node.peers.caller.call(view.coordinator, ask, answered)
        while not done.wait(_SECONDS_BETWEEN_TRIES):
            if self._closed.is_set():
                return False
        return isinstance(answers[0], messages.Granted)


def _described(shard: ShardServer) -> dict[str, Json]:
    replica, state = shard.replica, shard.state
    with shard.lane.state_lock:
        return {
            "head": replica.is_head,
            "updates": state.updates,
            "pulls": shard.pulled,
            "seconds": dict(shard.seconds),
            "time": replica.clock.time,
            "low": replica.clock.low,
            "bytes": state.bytes,
            "notes_changes": bool(state.chain),
            "tables": {
                name: {
                    "rows": len(table),
                    "bytes": table.bytes,
                    "updates": table.steps,
                    "not_admitted": table.dropped,
                    "evicted": table.evicted,
                }
                for name, table in state.tables.items()
            },
            "dense": {name: group.bytes for name, group in state.dense.items()},
            "batches": {name: size(each.done) for name, each in replica.clock.accounts.items()},
            "begun": {name: len(each.begun) for name, each in replica.clock.accounts.items()},
        }


def metrics() -> str:
    """Returns what this worker has done as a server, in Prometheus' text exposition format.

    Its names begin with ``tensorwire_ps_``, so that it may follow ``rpc.metrics()``'s text.
    It is empty for a worker that is no server.

    Raises:
        NotInitializedError: ``rpc.init_rpc`` was not called.

    Example::

        text = rpc.metrics().to_prometheus() + ps.metrics()
    """
    return text_of(host().describe_all())


def serve(
    until: str | None = None, memory: int | None = None, device: str | torch.device = "cpu"
) -> None:
    """Keeps shares of tables and dense parameters until the group does not need them any more.

    Call it on a worker that has nothing else to do, in place of ``rpc.shutdown``; what ends it
    is said in :func:`rpc.serve`.

    Args:
        until: see :func:`rpc.serve`.
        memory: bytes that rows, state and indexes may take; a push that may need more is
            refused whole. Default: what the machine has.
        device: where float32 rows of tables and their state are, e.g. ``"cuda:0"``. Rules then
            run there, as torch operators, whose last bits are the device's own. Indexes, rows of
            16 bits and dense parameters stay in the host's memory. Default the host's memory.

    Raises:
        TypeError: ``memory`` is no whole number.
        ValueError: it is less than 1, or there is no such device.
        NotInitializedError: ``rpc.init_rpc`` was not called.
    """
    if memory is not None:
        whole("serve", "memory", memory)
    here = host()
    here.memory = memory
    here.device = available.device(device)
    load_kernels()
    here.start(here.announce)
    with _sparing_collections():
        rpc.serve(until)


@contextmanager
def _sparing_collections() -> Iterator[None]:
    """Spares the garbage collector what is there now, such as torch's and numba's modules.

    A full collection of some 300 000 objects stops a server for 0.2 s, and all trainers with it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
