"""One server's part in one cluster: its shards, the view it knows, and what others call.

Decisions are made under one lock. What they send is sent after it was released, and what they do
to the state of a shard is done in that shard's lane, in the order in which it was decided.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Final, TypeVar

from tensorwire.parameter_server.decisions import orders, shares, views
from tensorwire.parameter_server.decisions.pushes import Push, Reached
from tensorwire.parameter_server.decisions.records import (
    Effect,
    Heard,
    Inform,
    NotHead,
    Record,
    Safe,
    StartCopy,
)
from tensorwire.parameter_server.decisions.replica import Replica
from tensorwire.parameter_server.decisions.replication import Forward
from tensorwire.parameter_server.decisions.views import Client, Server, View
from tensorwire.parameter_server.kernels import kernels
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST
from tensorwire.parameter_server.messaging.messages import Message
from tensorwire.parameter_server.messaging.outbox import Outbox
from tensorwire.parameter_server.messaging.settings import consistency_of
from tensorwire.parameter_server.opaque import Function
from tensorwire.parameter_server.server.available import Claim
from tensorwire.parameter_server.server.coordinating import Coordinating
from tensorwire.parameter_server.server.copying import Copies, Name
from tensorwire.parameter_server.server.exports import Exports
from tensorwire.parameter_server.server.peers import Peers
from tensorwire.parameter_server.server.shard import Call, PullCall, PushCall, ShardServer
from tensorwire.parameter_server.server.state import ShardState, rows_of
from tensorwire.parameter_server.server.writing import write_for

if TYPE_CHECKING:
    from tensorwire.parameter_server.server.host import Host

_logger: Final = logging.getLogger("tensorwire")
_MOST_EARLY: Final = 10_000
_SECONDS_BETWEEN_TRIES: Final = 0.05
_UNWRITTEN: Final = 2
"""Snapshots of which a head remembers the rows until it is told to write them."""


What = TypeVar("What")
Decide = Callable[[Replica, What, object], list[Effect]]


class Node:
    """One server in one cluster.

    Args:
        host: the server process.
        cluster: the cluster's name.
    """

    def __init__(self, host: Host, cluster: str) -> None:
        self.host = host
        self.cluster = cluster
        self.me = Server(host.worker.info.name, host.worker.life.incarnation)
        self.view: View | None = None
        self.shards: dict[int, ShardServer] = {}
        self.peers = Peers(self)
        self.copies = Copies(self)
        self._exports = Exports(self)
        self.coordinating = Coordinating(self)
        self._term = -1
        self._versions: dict[int, int] = {}
        self._was_named = False
        self._expelled = False
        self._early: dict[int, list[tuple[Call, messages.Logged]]] = {}
        self._joining: set[int] = set()
        outbox = Outbox(RLock())
        self.acting, self.later = outbox.acting, outbox.later
        self.is_closed = False

    # --- the end

    def close(self) -> None:
        """Turns everybody away."""
        with self.acting():
            self.is_closed = True
            self._end()
        self.peers.caller.give_up()

    def _end(self) -> None:
        self.coordinating.close()
        self.peers.end()
        early, self._early = self._early, {}
        for call in [call for waiting in early.values() for call, _ in waiting]:
            call.answer(NotHead())
        for number, shard in self.shards.items():
            self.carry_out(number, shard.replica.deposed())

    @property
    def has_ended(self) -> bool:
        """True if this server has no part any more, so that it decides nothing.

        It was taken for lost by the others, or a view that named it does so no longer.
        """
        if self.view is None:
            return self._expelled
        forgotten = self._was_named and not views.names(self.view, self.me)
        trainers = (each.client for each in self.view.trainers)
        others: list[Server | Client] = [*self.view.servers, *trainers]
        return self._expelled or forgotten or self.peers.lives.is_cut_off(others)

    # --- views

    def see(self, view: View) -> None:
        """Takes a view, which may be a later one."""
        if self.view is not None and view.number <= self.view.number:
            self.coordinating.look()
            return
        self.view = view
        self._versions = {each.number: each.version for each in view.shards}
        self._was_named |= views.names(view, self.me)
        self._term = max(self._term, view.term)
        kept = {number: shard.replica.version for number, shard in self.shards.items()}
        for number in shares.given_up(view, self.me, kept, self._joining):
            self._drop(number)
        mine = shares.of(view, self.me)
        self._joining -= mine.keys()
        for number, shard in mine.items():
            if number not in self.shards:
                self._make(number)
            self.carry_out(number, self.shards[number].replica.rechained(shard))
            self._take_early(number)
        self.coordinating.seen(view)
        self.peers.vote()
        for number in list(self.shards):
            self._exports.send(number)
            self.carry_out(number, self.shards[number].replica.inform_again())
        self.coordinating.look()

    def _make(self, number: int, position: int = 0, version: int = -1) -> ShardServer:
        assert self.view is not None
        consistency = consistency_of(self.view.settings)
        replica = Replica(self.me, number, consistency, position, version)
        buffers, device = self.host.worker.reply_buffer, self.host.device
        state = ShardState(number, consistency, kernels(), buffers, device)
        shard = ShardServer(replica, state, self._changed, self.copies.begin)
        self.shards[number] = shard
        return shard

    def _drop(self, number: int) -> None:
        self.carry_out(number, self.shards[number].replica.deposed())
        del self.shards[number]
        self._joining.discard(number)

    def heard_lost(self, server: Server) -> None:
        """Takes note that a worker is gone, which may have been a server."""
        if server == self.me:
            self._expel()
            return
        with self.acting():
            self.peers.lost(server)
            for number, shard in list(self.shards.items()):
                self.carry_out(number, shard.replica.heir_lost(server))
            self.copies.forget(server)
            self.peers.vote()
            self.coordinating.heard_lost(server)

    def _expel(self) -> None:
        """Turns everybody away and decides nothing, as the others took this server for lost."""
        with self.acting():
            if not self._expelled:
                self._expelled = True
                _logger.warning("server %s was taken for lost, and leaves cluster %r to the others",
                                self.me, self.cluster)  # fmt: skip
                self._end()

    def heard_came(self, server: Server) -> None:
        """Takes note that a worker is there, which may be a server."""
        with self.acting():
            self.peers.came(server)
            self.peers.vote()
            self.coordinating.heard_came(server)

    # --- what others call

    def handle(self, call: Call, message: Message) -> None:
        """Answers a call."""
        with self.acting():
            if self.is_closed or self._expelled:
                call.answer(_turned_away(message))
            else:
                self._handlers[type(message)](self, call, message)

    def _exchange(self, call: Call, message: messages.Exchange) -> None:
        shard = self.shards.get(message.shard)
        if shard is None:
            call.answer(messages.Elsewhere())
            return
        if shard.broken:
            call.answer(messages.Broken(shard.broken))
            return
        push, pull = message.push, message.pull
        if push is not None:
            full = self.host.take_room(self._claim(shard, push), shard)
            if full:
                call.answer(messages.Full(full))
                return
            asked = PushCall(call, push.trainer, pull is not None)
            self.carry_out(message.shard, shard.replica.pushed(push, asked))
        if pull is not None:
            pull = replace(pull, ask=PullCall(call, pull.ask))
            self.carry_out(message.shard, shard.replica.pulled(pull, time.monotonic()))

    def _claim(self, shard: ShardServer, push: Push) -> Claim:
        place = (self.cluster, shard.replica.shard, push.trainer)
        return Claim(place, push.number, shard.state.bytes_wanted(rows_of(push.load)))

    def _reserve(self, call: Call, message: messages.Reserve) -> None:
        shard = self.shards.get(message.shard)
        if shard is None or not shard.replica.is_head:
            call.answer(NotHead())
            return
        place = (self.cluster, message.shard, message.trainer)
        claim = Claim(place, message.number, shard.state.bytes_wanted(message.rows))
        full = self.host.reserve(claim)
        call.answer(messages.Full(full) if full else True)

    def _command(self, call: Call, message: messages.Command) -> None:
        self.see(View.decode(message.view))
        shard = self.shards.get(message.shard)
        if message.term < self._term or shard is None:
            call.answer(NotHead())
            return
        self._term = message.term
        order = message.order
        if isinstance(order, orders.Silence):
            self.host.give_room_back(self.cluster, message.shard, order.trainer)
        if isinstance(order, orders.Write):
            self.later(lambda: self.host.start(lambda: self._write(call, shard, order)))
        else:
            self.carry_out(message.shard, shard.replica.ordered(order, call))

    def _write(self, call: Call, shard: ShardServer, order: orders.Write) -> None:
        with shard.lane.state_lock:
            frozen = shard.state.frozen.pop(order.change, None)
        if frozen is None or isinstance(frozen, orders.Unmarked):
            call.answer(frozen)
            return
        number = shard.replica.shard
        try:
            call.answer(write_for(order.folder, number, frozen, shard.lane.state_lock))
        except Exception as error:
            _logger.warning("shard %d could not write its snapshot: %s", number, error)
            call.answer(f"{type(error).__name__}: {error}")
        finally:
            with shard.lane.state_lock:
                shard.state.thaw(frozen)

    def _logged(self, call: Call, message: messages.Logged) -> None:
        shard = self.shards.get(message.shard)
        if self._is_outdated(call, message.shard, message.version):
            return
        if shard is not None:
            effects = shard.replica.received(
                message.version, message.position, message.record, call
            )
            self.carry_out(message.shard, effects)
            return
        early = self._early.setdefault(message.shard, [])
        early.append((call, message))
        if len(early) > _MOST_EARLY:
            early.pop(0)

    def _is_outdated(self, call: Call, shard: int, version: int) -> bool:
        """Turns a server away that acts for a chain which was replaced, and tells it so."""
        known = self._versions.get(shard)
        if known is not None and version >= known:
            return False
        if self.view is None or not views.is_outdated(self.view, shard, version):
            return False
        call.answer(messages.Outdated(self.view.encode()))
        return True

    def _take_early(self, number: int) -> None:
        for call, message in self._early.pop(number, []):
            self._logged(call, message)

    def _decide(self, call: Call, number: int, decide: Decide[What], what: What) -> None:
        """Has the replica of a shard decide, if the shard is here."""
        shard = self.shards.get(number)
        if shard is None:
            call.answer(NotHead())
        else:
            self.carry_out(number, decide(shard.replica, what, call))

    def _bring(self, call: Call, message: messages.Bring) -> None:
        if not self._is_outdated(call, message.rows.source, message.version):
            self._decide(call, message.shard, Replica.imported, message.rows)

    def _tell(self, call: Call, message: messages.Telling) -> None:
        if not self._is_outdated(call, message.heard.source, message.version):
            self._decide(call, message.shard, Replica.told, message.heard)

    def _set(self, call: Call, message: messages.Setting) -> None:
        self._decide(call, message.shard, Replica.assigned, message.values)

    def _get(self, call: Call, message: messages.Getting) -> None:
        shard = self.shards.get(message.shard)
        if shard is None:
            call.answer(NotHead())
            return
        may, effects = shard.replica.looked_at(time.monotonic())
        self.carry_out(message.shard, effects)
        if not may:
            call.answer(NotHead())
            return

        def answer() -> None:
            with shard.lane.state_lock:
                group = shard.state.dense.get(message.name)
                data = NotHead() if group is None else group.data(group.pieces)
            call.answer(data)

        self.later(answer)

    def _copy_piece(self, call: Call, message: messages.CopyPiece) -> None:
        may_copy = self._may_copy(message.copy, message.version)
        call.answer(self.copies.take(message) if may_copy else False)

    def _may_copy(self, copy: Name, version: int) -> bool:
        """False if a later chain of a shard does without the server that makes a copy of it."""
        shard, _, sender = copy
        if self.view is None or not views.is_outdated(self.view, shard, version):
            return True
        described = self.view.shard(shard)
        return described is not None and sender in map(str, described.chain)

    def _install(self, call: Call, message: messages.Install) -> None:
        number = message.shard
        pieces = self.copies.taken(message.copy)
        there = self.shards.get(number)
        if there is not None and there.replica.version >= message.version:
            call.answer(False)  # it comes from somebody who was replaced
            return
        if self.view is None or not self._may_copy(message.copy, message.version):
            call.answer(False)
            return
        shard = self._make(number, message.position, message.version)
        shard.replica.load(message.state)
        shard.state.become(message.rest, pieces)
        self._joining.add(number)
        self._take_early(number)
        call.answer(True)

    def _count_of(self, call: Call, message: messages.CountOf) -> None:
        for shard in self.shards.values():
            clock = shard.replica.clock
            active = self.view is not None and shard.replica.shard in self.view.active
            if shard.replica.is_head and active and message.trainer in clock.members:
                call.answer(clock.count(message.trainer))
                return
        call.answer(None)

    def _account_of(self, call: Call, message: messages.AccountOf) -> None:
        self._decide(call, message.shard, Replica.counted, message.sampler)

    def _lease_of(self, call: Call, message: messages.LeaseOf) -> None:
        self._decide(call, message.shard, Replica.leased, message.asked)

    def _asking(self, call: Call, message: messages.Asking) -> None:
        self.coordinating.asked(call, message.what)

    def _see(self, call: Call, message: messages.See) -> None:
        self.see(View.decode(message.view))
        call.answer(True)

    def _latest_view(self, call: Call, message: messages.LatestView) -> None:
        call.answer(None if self.view is None else self.view.encode())

    def _take_poll(self, call: Call, message: messages.Poll) -> None:
        view = View.decode(message.view)
        self.see(view)
        self.peers.polled(call, view, message.suspects)

    def _describe(self, call: Call, message: messages.Describe) -> None:
        call.answer(self.host.describe(self))

    _handlers: Final[dict[type, Function]] = {
        messages.Exchange: _exchange,
        messages.Reserve: _reserve,
        messages.Command: _command,
        messages.Logged: _logged,
        messages.Bring: _bring,
        messages.Telling: _tell,
        messages.Setting: _set,
        messages.Getting: _get,
        messages.CopyPiece: _copy_piece,
        messages.Install: _install,
        messages.CountOf: _count_of,
        messages.AccountOf: _account_of,
        messages.LeaseOf: _lease_of,
        messages.Asking: _asking,
        messages.See: _see,
        messages.LatestView: _latest_view,
        messages.Poll: _take_poll,
        messages.Describe: _describe,
    }

    # --- what is to be done

    def carry_out(self, number: int, effects: list[Effect]) -> None:
        """Does what the replica of a shard has decided, in that order."""
        shard = self.shards[number]
        for effect in effects:
            if isinstance(effect, Forward):
                self._forward(number, effect)
            elif isinstance(effect, Inform):
                self._inform(number, effect)
        work = [effect for effect in effects if not isinstance(effect, Forward | Inform)]
        if work:
            shard.lane.put(work)
            self.later(shard.lane.run)

    def _forward(self, number: int, effect: Forward[Record]) -> None:
        def acknowledged(answer: object) -> None:
            shard = self.shards.get(number)
            if shard is not None and isinstance(answer, Safe):
                effects = shard.replica.acknowledged(effect.to, answer.position, effect.version)
                self.carry_out(number, effects)

        record = messages.Logged(number, effect.version, effect.position, effect.record)
        self.peers.call(effect.to, record, acknowledged)

    def _inform(self, number: int, effect: Inform) -> None:
        assert self.view is not None
        heard, version = Heard(number, effect.ready), self.shards[number].replica.version
        for other in effect.ready.others:
            described = self.view.shard(other)
            if described is not None and described.chain:
                telling = messages.Telling(other, version, heard)
                self.peers.call(described.head, telling, self._informed(number))

    def _informed(self, number: int) -> Callable[[object], None]:
        def done(answer: object) -> None:
            if answer is LOST or isinstance(answer, NotHead):
                self.try_again(partial(self._inform_again, number))

        return done

    def _inform_again(self, number: int) -> None:
        with self.acting():
            shard = self.shards.get(number)
            if shard is not None:
                self.carry_out(number, shard.replica.inform_again())

    def try_again(self, action: Callable[[], None]) -> None:
        """Runs ``action`` soon, without the lock: what it sends was not taken now."""
        self.later(lambda: self.host.after(_SECONDS_BETWEEN_TRIES, action))

    def copied(self, shard: ShardServer, effect: StartCopy, arrived: bool) -> None:
        """Notes whether a copy has arrived at a new backup."""
        number = shard.replica.shard
        if self.shards.get(number) is shard:
            follow = shard.replica.copied if arrived else shard.replica.heir_lost
            self.carry_out(number, follow(effect.heir))

    def _changed(self, shard: ShardServer, what: object) -> None:
        """Notes that the state of a shard has changed; called by its lane."""
        self.host.worker.progress.count()
        if isinstance(what, Reached) and isinstance(what.cut.action, orders.Freeze):
            kept = _UNWRITTEN if shard.replica.is_head else 0
            with shard.lane.state_lock:
                shard.state.forget_frozen(kept)
        if isinstance(what, Reached) and isinstance(what.cut.action, orders.Move):
            with self.acting():
                self._exports.send(shard.replica.shard)


def _turned_away(message: Message) -> object:
    """The answer of a server that leaves."""
    if isinstance(message, messages.Exchange):
        return messages.Elsewhere()
    if isinstance(message, messages.Asking):
        return messages.Rejected("")
    return NotHead()
