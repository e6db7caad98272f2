"""One worker's dealings with the servers of one cluster.

Sends pushes and pulls to the shards' heads, keeps pushes until they are safe, and sends
again what a lost head did not take or what was split by an old map. Decides under one lock and
sends without it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

from torch import Tensor

import rpc
from rpc import extend
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client import answers, splitting
from tensorwire.parameter_server.client.exchange import Answer, KnownRows, PendingPull, StepPush
from tensorwire.parameter_server.client.news import News
from tensorwire.parameter_server.client.packing import Packer
from tensorwire.parameter_server.client.patience import Patience
from tensorwire.parameter_server.client.retrying import Part, Retrier, Tries
from tensorwire.parameter_server.client.room import Room
from tensorwire.parameter_server.client.servers import Servers
from tensorwire.parameter_server.client.slow_server import SlowServer
from tensorwire.parameter_server.client.trainer import Trainer, Undone
from tensorwire.parameter_server.client.undone import undone_of_others
from tensorwire.parameter_server.decisions.pushes import Push, PushKind, Refusal
from tensorwire.parameter_server.decisions.reads import Pull
from tensorwire.parameter_server.decisions.records import NotHead
from tensorwire.parameter_server.decisions.unacknowledged import Unacknowledged
from tensorwire.parameter_server.decisions.views import Client, Server, Snapshot, View
from tensorwire.parameter_server.declarations.dense_spec import DenseSpec
from tensorwire.parameter_server.declarations.spec import TableSpec
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST, Caller
from tensorwire.parameter_server.messaging.messages import CHANNEL, TableIds
from tensorwire.parameter_server.messaging.outbox import Outbox
from tensorwire.parameter_server.messaging.settings import Meeting

_NOBODY: Final = (messages.Elsewhere, NotHead)
_UNDER_WAY: Final = 8
"""Pushes that may be unsafe at a time; the next one waits."""


class Session:
    """One worker in one cluster.

    Args:
        worker: the worker.
        cluster: the cluster's name.
        view: its view.
        session: how often this worker has joined this cluster before.
        patience: seconds for which servers may be out of reach.

    Attributes:
        worker: likewise.
        cluster: likewise.
        view: the latest one that is known here. Replaced as a whole, with the lock held.
        client: this life of this worker.
        trainer: the count of its pushes. Guarded by the lock.
        rollbacks: how often the cluster went back. Guarded by the lock.
        deals: the latest deal of samples that a server has told of. Guarded by the lock.
        pulls: how many were made. Guarded by the lock.
        packer: divides and packs pushes and pulls.
        news: of other clients, and of views.
        servers: asks them.
    """

    def __init__(
        self, worker: extend.Worker, cluster: str, view: View, session: int, patience: float
    ) -> None:
        self.worker = worker
        self.cluster = cluster
        self.view = view
        self.client = Client(worker.info.name, worker.life.incarnation, session)
        self.trainer = Trainer()
        self.rollbacks = 0
        self.deals = 0
        self.pulls = 0
        self.packer = Packer(worker)
        self._meeting = Meeting(worker)
        self._caller = Caller(worker, cluster)
        self._specs: dict[str, TableSpec | DenseSpec] = {}
        """Declarations of this worker by name; changed by the thread that declares."""
        self._condition = threading.Condition(threading.RLock())
        """The lock that guards what follows, notified when that changes."""
        self._kept = Unacknowledged[StepPush, object]()
        """Pushes until they are safe at all shards."""
        self._asked: dict[int, PendingPull] = {}
        """Pulls whose answers nobody has taken yet, by number."""
        self._errors: dict[int, Exception] = {}
        """The reason for which a server refused a push, by the push's number."""
        self._rolled: errors.RolledBack | None = None
        """A roll-back that nobody was told of yet."""
        self._failure: Exception | None = None
        """The error after which nothing can be done any more."""
        outbox = Outbox(self._condition)
        self._acting, self._later = outbox.acting, outbox.later
        channel = CHANNEL + cluster
        self.news = News(worker, channel, self._condition, lambda: self._failure)
        self.servers = Servers(
            worker, self._caller, self.news, lambda: self.view, self.refresh, Patience(patience)
        )
        self._room = Room(self.servers, lambda: self.view)
        self._slow = SlowServer(cluster, self._caller, lambda: self.view)
        self._again = Retrier(self._condition, outbox, self._tries())
        self._forget = worker.subscribe(channel, self._hear)
        self._again.start()

    def _tries(self) -> Tries:
        return Tries(
            self.refresh,
            self.servers.spread,
            self._push_again,
            self._pull_again,
            self._fail,
            lambda: self._failure is not None,
        )

    def close(self) -> None:
        """Ends it: whoever waits is told that this worker has left."""
        self._fail(rpc.AgentClosedError(f"worker {self.worker.info.name!r} has left its group"))
        self._forget()
        self._again.join(10)

    def _fail(self, error: Exception) -> None:
        with self._acting():
            if self._failure is None:
                self._failure = error
                self._later(self._caller.give_up)
            self._condition.notify_all()

    @property
    def is_closed(self) -> bool:
        """True if nothing can be done with it any more."""
        return self._failure is not None

    @contextmanager
    def _naming_all_lost(self) -> Iterator[None]:
        """Completes the error of a roll-back, which waits for others, so without the lock."""
        try:
            yield
        except errors.RolledBack as error:
            raise self._named(error) from None

    @property
    def open_pulls(self) -> int:
        """Pulls whose answers nobody has taken yet."""
        return len(self._asked)

    # --- what a user does

    def knows(self, name: str, spec: TableSpec | DenseSpec) -> None:
        """Takes a declaration of a table or dense group."""
        self._specs[name] = spec

    def send(
        self,
        whole: StepPush | None,
        wanted: Sequence[TableIds] = (),
        dense: tuple[str, ...] = (),
        known: Sequence[KnownRows] = (),
        is_aside: bool = False,
    ) -> tuple[int, PendingPull | None]:
        """Pushes, pulls, or both in one message to each shard.

        Args:
            whole: the push; None for none.
            wanted: ids of rows to pull; no table twice.
            dense: names of dense groups to pull.
            known: of each of ``wanted`` what is known here; empty if nothing is kept.
            is_aside: whether the next push does not name what is pulled.

        Returns:
            The number of the push, or -1, and the pull if something is to be pulled.
        """
        self._await(lambda: len(self._kept) < _UNDER_WAY or whole is None, None)
        full = self._no_room(whole)
        if full is not None:  # an empty push takes its place, so that nobody waits for it
            whole = StepPush(PushKind.SKIP)
        with self._naming_all_lost(), self._acting():
            self._raise_failure()
            number, parts = -1, {}
            if whole is not None:
                number = self.trainer.take()
                parts = dict.fromkeys(self.view.active, PushKind.UPDATE)
                self._kept.add(number, self.view.epoch, whole, parts)
            asked = self._ask(wanted, dense, known, is_aside) if wanted or dense else None
            if full is not None and asked is None:
                self._errors[number] = full
            elif full is not None and asked is not None:
                asked.error = full
            if whole is not None or asked is not None:  # else there is nothing to answer
                for shard in self.view.active:
                    self._post(shard, number, whole, asked)
        return number, asked

    def _no_room(self, whole: StepPush | None) -> Exception | None:
        """The reason for which servers would take a push in part; None if they take all of it."""
        if whole is None or whole.kind is not PushKind.UPDATE:
            return None

        def parted(each: splitting.RowGradients, view: View) -> splitting.Split:
            return self.packer.split_of(each.rows, view)[0]

        return self._room.refusal(self.trainer.number, self.trainer.next, whole.tables, parted)

    def _ask(
        self,
        wanted: Sequence[TableIds],
        dense: tuple[str, ...],
        known: Sequence[KnownRows],
        is_aside: bool,
    ) -> PendingPull:
        self.pulls += 1
        asked = PendingPull(self.pulls, wanted, dense, self.trainer.reads, known, is_aside)
        self._asked[self.pulls] = asked
        self.packer.split(asked, self.view)
        return asked

    def wait_for(self, asked: PendingPull, timeout: float | None) -> Answer:
        """Waits for the answer to a pull."""
        self._await(lambda: asked.is_done, timeout)
        with self._naming_all_lost(), self._acting():
            self._asked.pop(asked.number, None)
            if asked.error is not None:
                self._raise(asked.error)
            self.packer.pulled(asked)
        return answers.joined(asked, self._specs)

    def drop(self, asked: PendingPull) -> None:
        """Drops the answer to a pull, for which nobody will wait."""
        with self._acting():
            self._asked.pop(asked.number, None)

    def wait_until_safe(self, number: int, timeout: float | None) -> None:
        """Waits until a push is safe at all shards.

        Raises:
            TimeoutError: it takes longer.
        """
        if not self.is_safe_within(number, timeout):
            raise self._too_late(timeout)

    def is_safe_within(self, number: int, timeout: float | None) -> bool:
        """Waits until a push is safe at all shards; False if it takes longer."""
        if not self._is_done_within(lambda: self._is_settled(number), timeout):
            return False
        with self._naming_all_lost(), self._acting():
            self._raise_failure()
            error = self._errors.pop(number, None)
        if error is not None:
            raise error
        return True

    def _is_settled(self, number: int) -> bool:
        return number in self._errors or not self._kept.holds(number)

    def unsafe_at(self, number: int) -> str:
        """The servers that have not said of a push that it is safe, for the log."""
        with self._condition:
            shards = self._kept.missing(number)
            heads = [self.view.shard(shard) for shard in shards]
        names = {each.head.name for each in heads if each is not None and each.chain}
        return ", ".join(sorted(names)) or "servers that are to take the place of lost ones"

    def take_refusals(self) -> list[Exception]:
        """The reasons for which servers refused pushes that nobody waited for."""
        with self._acting():
            refused, self._errors = list(self._errors.values()), {}
        return refused

    def keep(self, number: int) -> None:
        """Copies the gradients of a push that are not safe yet, as they may change from now on."""
        with self._acting():
            whole: StepPush | None = self._kept.whole(number)
            for each in whole.dense.values() if whole is not None else ():
                each.keep()

    def _await(self, done: Callable[[], bool], timeout: float | None) -> None:
        if not self._is_done_within(done, timeout):
            raise self._too_late(timeout)

    def _is_done_within(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Waits for something, or for the end of this session or a roll-back."""
        with self._condition:
            is_over = self._condition.wait_for(
                lambda: done() or self._failure is not None or self._rolled is not None, timeout
            )
            if self._failure is not None and not done():
                raise self._failure
        return is_over

    def _too_late(self, timeout: float | None) -> TimeoutError:
        return TimeoutError(
            f"the servers of cluster {self.cluster!r} did not answer in {timeout} seconds"
        )

    def raise_failure(self) -> None:
        """Raises the error with which this has ended, or a roll-back that nobody was told of."""
        with self._naming_all_lost(), self._acting():
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._rolled is not None:
            self._raise(self._rolled)

    def _raise(self, error: Exception) -> NoReturn:
        if error is self._rolled:
            self._rolled = None
        raise error

    # --- messages

    def _post(
        self, shard: int, number: int, whole: StepPush | None, asked: PendingPull | None
    ) -> None:
        """Sends a push, a pull or both to a shard, on another thread."""
        described = self.view.shard(shard)
        if described is None or not described.chain:
            self._note_reached(shard, described is None)
            self._note_again(shard, number, asked)
            return
        view, head = self.view, described.head
        epoch, client = view.epoch, self.trainer.number
        # A pull may be split anew for a later view before this is sent.
        by, splits = (asked.epoch, asked.splits) if asked is not None else (-1, [])

        def send() -> None:
            push = pull = None
            if whole is not None:
                kind = whole.kind if shard not in whole.refused_by else PushKind.SKIP
                load = self.packer.load(whole, view, shard, head)
                push = Push(client, number, epoch, kind, load, whole.batches)
            if asked is not None:
                question = self.packer.question(asked, splits, shard, self.trainer.number)
                pull = Pull(asked.step, by, question)
            message = messages.Exchange(self.cluster, shard, push, pull)
            begin = time.perf_counter()

            def replied(reply: object) -> None:
                self._slow.answered(head.name, time.perf_counter() - begin)
                if isinstance(reply, messages.PullReply | messages.Accepted) and reply.room >= 0:
                    self._room.told(shard, head, reply.room)
                answer = reply if self._may_speak_for(shard, head, reply) else NotHead()
                self._replied(shard, number, epoch, asked, answer)

            self._caller.call(head, message, replied)

        self._later(send)

    def _replied(
        self, shard: int, number: int, epoch: int, asked: PendingPull | None, reply: object
    ) -> None:
        with self._acting():
            if self._failure is not None:
                return
            self._note_reached(shard, reply is not LOST and not isinstance(reply, _NOBODY))
            if isinstance(reply, messages.PullReply | messages.Accepted) and self.view.shard(shard):
                self.deals = max(self.deals, reply.deals)
            if isinstance(reply, messages.PullReply):
                self._again.answered()
                self._kept.safe(shard, reply.safe)
                if asked is not None and asked.epoch == epoch:
                    asked.answers[shard] = reply
                    asked.missing.discard(shard)
            elif isinstance(reply, messages.Accepted):
                self._again.answered()
                self._kept.safe(shard, reply.safe)
            elif isinstance(reply, messages.Broken):
                self._fail(errors.ParameterServerError(f"shard {shard} is broken: {reply.text}"))
            elif isinstance(reply, messages.Unread):
                self._kept.safe(shard, reply.safe)
                if asked is not None:
                    text = f"shard {shard} could not answer a pull: {reply.text}"
                    asked.error = errors.ParameterServerError(text)
            elif isinstance(reply, messages.Full):
                self._refused_for_memory(shard, number, asked, reply.text)
            elif self._is_done_for(reply):
                self._kept.safe(shard, number + 1)
            else:
                self._note_again(shard, number, asked)
            self._condition.notify_all()

    def _is_done_for(self, reply: object) -> bool:
        """True if a shard has forgotten this trainer, as it took all, the last push included."""
        unknown = isinstance(reply, messages.Denied) and reply.reason is Refusal.UNKNOWN
        return self.trainer.is_finishing and unknown and self.view.trainer(self.client) is not None

    def _refused_for_memory(
        self, shard: int, number: int, asked: PendingPull | None, text: str
    ) -> None:
        """Puts an empty push in the place of one without memory, so that nobody waits for it."""
        rest = "; others have taken their parts" if len(self.view.active) > 1 else ""
        text = f"nothing was taken by it: {text}{rest}"
        self._errors.setdefault(number, errors.OutOfMemoryError(text))
        if asked is not None:
            asked.error = self._errors.pop(number)
        whole = self._kept.whole(number)
        if whole is not None:
            whole.refused_by.add(shard)
            self._post(shard, number, whole, None)

    def _may_speak_for(self, shard: int, server: Server, reply: object) -> bool:
        """False if this client knows a later chain of a shard than the server that answers."""
        described = self.view.shard(shard)
        if described is None:
            return True
        is_old = (
            isinstance(reply, messages.PullReply | messages.Accepted)
            and reply.version < described.version
        )
        return described.chain[:1] in ((server,), ()) and not is_old

    def _note_reached(self, shard: int, was_reached: bool) -> None:
        """Gives up if nobody has served a shard for too long."""
        if was_reached:
            self.servers.reached(shard)
            return
        try:
            self.servers.found_nobody(shard, f"that keeps shard {shard}")
        except errors.ParameterServerError as error:
            self._fail(error)

    # --- trying again

    def _note_again(self, shard: int, number: int, asked: PendingPull | None) -> None:
        if number >= 0:
            self._again.push(Part(shard, number))
        if asked is not None:
            self._again.pull(Part(shard, asked.number))

    def _push_again(self, part: Part) -> None:
        shard, number = part.shard, part.number
        whole = self._kept.whole(number)
        if whole is None:
            return
        self.require_trainer()
        epoch = self.view.epoch
        if self._kept.epoch(number) != epoch:
            self._kept.add(number, epoch, whole, dict.fromkeys(self.view.active, whole.kind))
            for each in self.view.active:
                self._post(each, number, whole, None)
        elif self._kept.holds(number, shard):
            self._post(shard, number, whole, None)

    def require_trainer(self) -> None:
        """Raises ``NotATrainerError`` if the cluster does without this worker by now."""
        if self.view.trainer(self.client) is None and not self.trainer.is_finishing:
            raise errors.NotATrainerError(
                f"worker {self.client.name!r} is no trainer of cluster {self.cluster!r} any more"
            )

    def _pull_again(self, part: Part) -> None:
        asked = self._asked.get(part.number)
        if asked is None or asked.is_done:
            return
        if asked.epoch != self.view.epoch:
            self.packer.split(asked, self.view)
            for each in self.view.active:
                self._post(each, -1, None, asked)
        elif part.shard in asked.missing:
            self._post(part.shard, -1, None, asked)

    # --- views

    def _hear(self, sender: extend.Life, body: bytes, tensors: list[Tensor]) -> None:
        if self.news.hear(sender, body):
            return
        with self._acting():
            self._see(View.decode(body.decode()))

    def refresh(self) -> None:
        """Reads the view in the store, and acts on it."""
        view = self._meeting.view(self.cluster)
        if view is not None:
            with self._acting():
                self._see(view)

    def _see(self, view: View) -> None:
        old = self.view
        if view.number <= old.number:
            return
        self.view = view
        if view.broken:
            self._fail(errors.ServerLostError(view.broken))
        elif view.generation > old.generation:
            self._roll_back(view)
        else:
            for number in self._kept.stranded({shard.number for shard in view.shards}):
                self._again.push(Part(-1, number))
            for shard in view.shards:
                before = old.shard(shard.number)
                if before is not None and before.chain[:1] != shard.chain[:1]:
                    for number, _, _ in self._kept.again(shard.number):
                        self._again.push(Part(shard.number, number))
        self.news.note()

    def _roll_back(self, view: View) -> None:
        snapshot = view.snapshot or Snapshot("", {}, 0)  # none if nobody had joined before
        self._kept.clear()
        self._errors.clear()
        self.packer.forget()
        self._again.forget()
        self.rollbacks += 1
        self.deals = 0
        is_told = self.trainer.number >= 0
        undone = self.trainer.go_back(self.client, view, snapshot)
        if undone is not None:
            self._again.first(partial(self._tell_undone, undone))
        if undone is None or not is_told:
            for number in self._asked:
                self._again.pull(Part(-1, number))
            return
        lost = {self.client.name: undone.pushes}
        self._rolled = errors.RolledBack(self.trainer.next, lost, snapshot.folder)
        for asked in self._asked.values():
            asked.error = self._rolled

    def _tell_undone(self, undone: Undone) -> None:
        self._meeting.undo(self.cluster, undone.generation, undone.trainer, undone.pushes)
        self.news.tell(each.client.name for each in self.view.trainers)

    def _named(self, error: errors.RolledBack) -> errors.RolledBack:
        """The error of a roll-back with what it undid of all trainers, not only of this one."""

        def latest() -> View:
            self.refresh()
            return self.view

        generation = self.view.generation
        undone = undone_of_others(
            self._meeting, self.cluster, self.client, generation, latest, self.news
        )
        undone.update(error.lost)
        return errors.RolledBack(error.step, undone, error.snapshot)

    # --- trainers

    def begin(self, number: int, count: int) -> None:
        """Makes this worker a trainer, whose first push has this number."""
        with self._acting():
            self.trainer.begin(number, count)

    def come_again(self, session: int) -> None:
        """This worker has finished, and is about to join as a client of its own.

        Args:
            session: how often it has been one before.
        """
        with self._acting():
            self.client = replace(self.client, session=session)

    def begin_to_finish(self) -> None:
        """Marks the next push as the last one, unless the cluster goes back first."""
        with self._naming_all_lost(), self._acting():
            self._raise_failure()
            self.trainer.is_finishing = True

    def takes_deals(self, shard: int, deals: int) -> bool:
        """Notes the latest deal that a shard's head tells; False if it keeps nothing any more."""
        with self._acting():
            is_there = self.view.shard(shard) is not None
            self.deals = deals if is_there else self.deals
        return is_there
