"""One worker's dealings with the servers of one cluster.

Sends pushes and pulls to the shards' heads, keeps pushes until they are safe, and sends again
what a lost head did not take or what was split by an old map. Decides under one lock and sends
without it. A thread of its own tries again what has failed.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

import rpc
from rpc import extend
from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client import answers, splitting
from tensorwire.parameter_server.client.bottleneck import Watch, reason
from tensorwire.parameter_server.client.exchange import Answer, KnownRows, PendingPull, Whole
from tensorwire.parameter_server.client.news import News
from tensorwire.parameter_server.client.patience import Patience
from tensorwire.parameter_server.client.room import Room
from tensorwire.parameter_server.client.servers import LONGEST_PAUSE, PAUSE, Servers
from tensorwire.parameter_server.client.undone import undone_of_others
from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.clock import Push, PushKind, Refusal
from tensorwire.parameter_server.decisions.reads import AT_ONCE, Pull
from tensorwire.parameter_server.decisions.replica import Counted, NotHead
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.decisions.unacknowledged import Unacknowledged
from tensorwire.parameter_server.decisions.views import Client, Server, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST, Caller
from tensorwire.parameter_server.messaging.messages import CHANNEL, TableIds
from tensorwire.parameter_server.messaging.outbox import Outbox
from tensorwire.parameter_server.messaging.settings import Meeting

_logger: Final = logging.getLogger("tensorwire")
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
        started: trainers that had been started by the time that this one was.
    """

    def __init__(
        self,
        worker: extend.Worker,
        cluster: str,
        view: View,
        session: int,
        started: int,
        patience: float,
    ) -> None:
        self.worker = worker
        self.cluster = cluster
        self.view = view
        self.client = Client(worker.info.name, worker.life.incarnation, session)
        self._started = started
        self.number = -1
        self.next = 0
        self._first = 0
        self.bytes_sent = 0
        self.rollbacks = 0
        self.deals = 0
        self._meeting = Meeting(worker)
        self._caller = Caller(worker, cluster)
        self._specs: dict[str, Any] = {}
        self._kept = Unacknowledged()
        self._asked: dict[int, PendingPull] = {}
        self.pulls = 0
        self._last_pull: dict[tuple[str, ...], tuple[splitting.Split, int]] = {}
        self._errors: dict[int, Exception] = {}
        self._rolled: errors.RolledBack | None = None
        self._undone: tuple[int, int, int] | None = None
        self._failure: Exception | None = None
        self._finishing = False
        self._again: set[tuple[str, int, int]] = set()
        self._watch = Watch()
        self._pause = PAUSE
        self._condition = threading.Condition(threading.RLock())
        outbox = Outbox(self._condition)
        self._acting, self._later = outbox.acting, outbox.later
        channel = CHANNEL + cluster
        self.news = News(worker, channel, self._condition, lambda: self._failure)
        self.servers = Servers(
            worker, self._caller, self.news, lambda: self.view, self.refresh, Patience(patience)
        )
        self._room = Room(self.servers, lambda: self.view)
        self._forget = worker.subscribe(channel, self._hear)
        self._context = contextvars.copy_context()
        self._tender = threading.Thread(target=self._tend, name="tensorwire-ps", daemon=True)
        self._tender.start()

    def close(self) -> None:
        """Ends it: whoever waits is told that this worker has left."""
        self._fail(rpc.AgentClosedError(f"worker {self.worker.info.name!r} has left its group"))
        self._forget()
        if self._tender is not threading.current_thread():
            self._tender.join(10)

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

    def knows(self, name: str, spec: Any) -> None:
        """Takes a declaration of a table or dense group."""
        self._specs[name] = spec

    def gather(self, whole: Whole) -> bool:
        """Copies the dense gradients of a push to where they are sent from, before it is sent.

        Returns:
            False if one of them is infinite or not a number; the push may still be given up.
        """
        with self._condition:
            view = self.view
        finite = True
        for shard in view.active if whole.dense else ():
            found = view.shard(shard)
            head = found.head if found is not None and found.chain else None
            pushes = self._dense(whole, view, shard, head)
            whole.gathered[view.epoch, shard, head] = {n: push for n, (push, _) in pushes.items()}
            finite &= all(is_finite for _, is_finite in pushes.values())
        return finite

    def send(
        self,
        whole: Whole | None,
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
            whole = Whole(PushKind.SKIP)
        with self._naming_all_lost(), self._acting():
            self._raise_failure()
            number, parts = -1, {}
            if whole is not None:
                number, self.next = self.next, self.next + 1
                parts = dict.fromkeys(self.view.active, PushKind.UPDATE)
                self._kept.add(number, self.view.epoch, whole, parts)
            asked = self._ask(wanted, dense, known, is_aside) if wanted or dense else None
            if full is not None and asked is None:
                self._errors[number] = full
            elif full is not None and asked is not None:
                asked.error = full
            for shard in self.view.active:
                self._post(shard, number, whole, asked)
        return number, asked

    def _no_room(self, whole: Whole | None) -> Exception | None:
        """The reason for which servers would take a push in part; None if they take all of it."""
        if whole is None or whole.kind is not PushKind.UPDATE:
            return None

        def parted(each: splitting.RowGradients, view: View) -> splitting.Split:
            return self._split_of(each.rows, view)[0]

        return self._room.refusal(self.number, self.next, whole.tables, parted)

    def _ask(
        self,
        wanted: Sequence[TableIds],
        dense: tuple[str, ...],
        known: Sequence[KnownRows],
        is_aside: bool,
    ) -> PendingPull:
        self.pulls += 1
        step = self.next if self.number >= 0 and not self._finishing else AT_ONCE
        asked = PendingPull(self.pulls, wanted, dense, step, known, is_aside)
        self._asked[self.pulls] = asked
        self._split(asked)
        return asked

    def _split(self, asked: PendingPull) -> None:
        view = self.view
        asked.epoch, asked.slots = view.epoch, view.slots
        asked.missing, asked.answers = set(view.active), {}
        asked.splits = [splitting.split(ids, view.slots, view.epoch) for ids in asked.tables]

    def wait_for(self, asked: PendingPull, timeout: float | None) -> Answer:
        """Waits for the answer to a pull."""
        self._await(lambda: asked.is_done, timeout)
        with self._naming_all_lost(), self._acting():
            self._asked.pop(asked.number, None)
            if asked.error is not None:
                self._raise(asked.error)
            for parted in () if asked.is_aside else asked.splits:
                self._last_pull[parted.rows.tables] = (parted, asked.number)
        return answers.joined(asked, self._specs)

    def drop(self, asked: PendingPull) -> None:
        """Nobody will wait for the answer to a pull."""
        with self._acting():
            self._asked.pop(asked.number, None)

    def wait_until_safe(self, number: int, timeout: float | None) -> None:
        """Waits until a push is safe at all shards."""
        self._await(lambda: self._is_settled(number), timeout)
        self._raise_error_of(number)

    def _is_settled(self, number: int) -> bool:
        return number in self._errors or not self._kept.holds(number)

    def _raise_error_of(self, number: int) -> None:
        with self._naming_all_lost(), self._acting():
            self._raise_failure()
            error = self._errors.pop(number, None)
        if error is not None:
            raise error

    def keep(self, number: int) -> None:
        """The gradients of a push may change from now on: copies what is not safe yet."""
        with self._acting():
            whole: Whole | None = self._kept.whole(number)
            for each in whole.dense.values() if whole is not None else ():
                each.keep()

    def _await(self, done: Callable[[], bool], timeout: float | None) -> None:
        with self._condition:
            if not self._condition.wait_for(
                lambda: done() or self._failure is not None or self._rolled is not None, timeout
            ):
                raise TimeoutError(f"the servers of cluster {self.cluster!r} did not answer in "
                                   f"{timeout} seconds")  # fmt: skip
            if self._failure is not None and not done():
                raise self._failure

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
        self, shard: int, number: int, whole: Whole | None, asked: PendingPull | None
    ) -> None:
        """Sends a push, a pull or both to a shard, soon."""
        found = self.view.shard(shard)
        if found is None or not found.chain:
            self._note_reached(shard, found is None)
            self._note_again(shard, number, asked)
            return
        view, head = self.view, found.head
        epoch, client = view.epoch, self.number

        def send() -> None:
            push = pull = None
            if whole is not None:
                kind = whole.kind if shard not in whole.refused_by else PushKind.SKIP
                load = self._load(whole, view, shard, head)
                push = Push(client, number, epoch, kind, load, whole.batches)
            if asked is not None:
                pull = Pull(asked.step, asked.epoch, self._question(asked, shard))
            message = messages.Exchange(self.cluster, shard, push, pull)
            begin = time.perf_counter()

            def replied(reply: Any) -> None:
                self._clock(head.name, time.perf_counter() - begin)
                if isinstance(reply, messages.Rows | messages.Accepted) and reply.room >= 0:
                    self._room.told(shard, head, reply.room)
                answer = reply if self._may_speak_for(shard, head, reply) else NotHead()
                self._replied(shard, number, epoch, asked, answer)

            self._caller.call(head, message, replied)

        self._later(send)

    def _clock(self, server: str, seconds: float) -> None:
        """An answer took so long; says so if this server is the one that all wait for."""
        with self._condition:
            found = self._watch.answered(server, seconds)
        if found is None:
            return
        name, mine, others = found
        slow = [each for each in self.view.servers if each.name == name]

        def tell(described: Any) -> None:
            why = reason(described) if isinstance(described, dict) else "it does not say why"
            _logger.warning(
                "server %r is the bottleneck of cluster %r: it answers in %.1f ms, the others in "
                "%.1f ms; %s", name, self.cluster, mine * 1e3, others * 1e3, why,
            )  # fmt: skip

        for each in slow:
            self._caller.call(each, messages.Describe(), tell)

    def _question(self, asked: PendingPull, shard: int) -> messages.Ask:
        tables = tuple([parted.parts[shard][1] for parted in asked.splits])
        name = self.worker.info.name
        trainer = -1 if asked.is_aside else self.number
        known = tuple([
            each.at(shard, parted.parts[shard][0])
            for each, parted in zip(asked.known, asked.splits, strict=False)
        ])  # fmt: skip
        return messages.Ask(trainer, name, asked.number, tables, asked.dense, known)

    def _load(self, whole: Whole, view: View, shard: int, head: Server) -> messages.Load | None:
        if whole.kind is not PushKind.UPDATE or shard in whole.refused_by:
            return None
        tables, buffers = [], partial(self._buffer, head)
        for each in whole.tables:
            parted, pulled = self._split_of(each.rows, view)
            tables.append(splitting.table_push(each, parted, shard, pulled, buffers))
        dense = whole.gathered.pop((view.epoch, shard, head), None)
        if dense is None:
            again = self._dense(whole, view, shard, head)
            dense = {name: push for name, (push, _) in again.items()}
        return messages.Load(tuple(tables), dense)

    def _dense(
        self, whole: Whole, view: View, shard: int, head: Server | None
    ) -> dict[str, tuple[messages.DensePush, bool]]:
        """A shard's share of each dense group, and whether it is finite."""
        buffers = partial(self._buffer, head)
        return {
            name: splitting.dense_push(group, view.slots, shard, buffers)
            for name, group in whole.dense.items()
        }

    def _buffer(self, to: Server | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory to send from."""
        with suppress(rpc.RpcError):
            if to is not None:
                return self.worker.send_buffer(to.name, shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def _split_of(self, rows: TableIds, view: View) -> tuple[splitting.Split, int]:
        """The split by which these very ids were pulled, and the pull's number, or a new one."""
        parted, pulled = self._last_pull.get(rows.tables, (None, -1))
        if parted is not None and parted.rows.ids is rows.ids and parted.epoch == view.epoch:
            return parted, pulled
        parted = splitting.split(rows, view.slots, view.epoch)
        self._last_pull[rows.tables] = (parted, -1)
        return parted, -1

    def _replied(
        self, shard: int, number: int, epoch: int, asked: PendingPull | None, reply: Any
    ) -> None:
        with self._acting():
            if self._failure is not None:
                return
            self._note_reached(shard, reply is not LOST and not isinstance(reply, _NOBODY))
            if isinstance(reply, messages.Rows | messages.Accepted) and self.view.shard(shard):
                self.deals = max(self.deals, reply.deals)
            if isinstance(reply, messages.Rows):
                self._pause = PAUSE
                self._kept.safe(shard, reply.safe)
                if asked is not None and asked.epoch == epoch:
                    asked.answers[shard] = reply
                    asked.missing.discard(shard)
            elif isinstance(reply, messages.Accepted):
                self._pause = PAUSE
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

    def _is_done_for(self, reply: Any) -> bool:
        """True if a shard has forgotten this trainer, as it took all, the last push included."""
        unknown = isinstance(reply, messages.Denied) and reply.reason is Refusal.UNKNOWN
        return self._finishing and unknown and self.view.trainer(self.client) is not None

    def _refused_for_memory(
        self, shard: int, number: int, asked: PendingPull | None, text: str
    ) -> None:
        """An empty push takes its place, so that nobody waits for it."""
        rest = "; others have taken their parts" if len(self.view.active) > 1 else ""
        text = f"nothing was taken by it: {text}{rest}"
        self._errors.setdefault(number, errors.OutOfMemoryError(text))
        if asked is not None:
            asked.error = self._errors.pop(number)
        whole = self._kept.whole(number)
        if whole is not None:
            whole.refused_by.add(shard)
            self._post(shard, number, whole, None)

    def _may_speak_for(self, shard: int, server: Server, reply: Any) -> bool:
        """False if this client knows a later chain of a shard than the server that answers."""
        found = self.view.shard(shard)
        if found is None:
            return True
        is_old = (
            isinstance(reply, messages.Rows | messages.Accepted) and reply.version < found.version
        )
        return found.chain[:1] in ((server,), ()) and not is_old

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
            self._again.add(("push", shard, number))
        if asked is not None:
            self._again.add(("pull", shard, asked.number))
        self._condition.notify_all()

    def _tend(self) -> None:
        self._context.run(self._tend_on)

    def _tend_on(self) -> None:
        tries = 0
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: bool(self._again or self._undone) or self._failure is not None
                )
                if self._failure is not None:
                    return
                undone, self._undone = self._undone, None
            try:
                if undone is not None:
                    self._meeting.undo(self.cluster, *undone)
                    self.news.tell(each.client.name for each in self.view.trainers)
                    continue
                with self._condition:
                    self._condition.wait_for(lambda: self._failure is not None, self._pause)
                    self._pause = min(self._pause * 1.5, LONGEST_PAUSE)
                tries += 1
                self.refresh()
                if tries % 8 == 0:
                    self.servers.spread()
                self._try_again()
            except Exception as error:
                self._fail(error)

    def _try_again(self) -> None:
        with self._acting():
            again, self._again = self._again, set()
            for kind, shard, number in sorted(again, key=lambda each: each[2]):
                if kind == "push":
                    self._push_again(shard, number)
                else:
                    self._pull_again(shard, number)

    def _push_again(self, shard: int, number: int) -> None:
        whole = self._kept.whole(number)
        if whole is None:
            return
        self._require_trainer()
        epoch = self.view.epoch
        if self._kept.epoch(number) != epoch:
            self._kept.add(number, epoch, whole, dict.fromkeys(self.view.active, whole.kind))
            for each in self.view.active:
                self._post(each, number, whole, None)
        elif self._kept.holds(number, shard):
            self._post(shard, number, whole, None)

    def _require_trainer(self) -> None:
        if self.view.trainer(self.client) is None and not self._finishing:
            raise errors.NotATrainerError(
                f"worker {self.client.name!r} is no trainer of cluster {self.cluster!r} any more"
            )

    def _pull_again(self, shard: int, number: int) -> None:
        asked = self._asked.get(number)
        if asked is None or asked.is_done:
            return
        if asked.epoch != self.view.epoch:
            self._split(asked)
            for each in self.view.active:
                self._post(each, -1, None, asked)
        elif shard in asked.missing:
            self._post(shard, -1, None, asked)

    # --- views

    def _hear(self, sender: extend.Life, body: bytes, tensors: list[Tensor]) -> None:
        if self.news.hear(sender, body):
            return
        with self._acting():
            self._see(View.decode(body.decode()))

    def refresh(self) -> None:
        """Looks into the store."""
        found = self._meeting.view(self.cluster)
        if found is not None:
            with self._acting():
                self._see(found)

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
                self._again.add(("push", -1, number))
            for shard in view.shards:
                before = old.shard(shard.number)
                if before is not None and before.chain[:1] != shard.chain[:1]:
                    for number, _, _ in self._kept.again(shard.number):
                        self._again.add(("push", shard.number, number))
        self.news.note()

    def _roll_back(self, view: View) -> None:
        snapshot = view.snapshot
        assert snapshot is not None
        self._kept.clear()
        self._errors.clear()
        self._last_pull.clear()
        self._again.clear()
        self.rollbacks += 1
        self.deals = 0
        trainer = view.trainer(self.client)
        if self.number < 0 or trainer is None:
            if trainer is not None:  # it has not heard yet that it is one
                self._undone = (view.generation, trainer.number, 0)
            for number in self._asked:
                self._again.add(("pull", -1, number))
            return
        known = [snapshot.counts[t.number] for t in view.trainers if t.number in snapshot.counts]
        start = min(known, default=snapshot.time)
        before, self.next = self.next, snapshot.counts.get(self.number, start)
        lost = max(0, before - max(self.next, self._first))
        self._first = min(self._first, self.next)
        self._undone = (view.generation, self.number, lost)
        error = errors.RolledBack(self.next, {self.client.name: lost}, snapshot.folder)
        self._rolled = error
        self._finishing = False
        for asked in self._asked.values():
            asked.error = error

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

    # --- joining and leaving

    def join(self) -> None:
        """Becomes a trainer; returns when it may push."""
        join = orders.Join(self.client, self._started)
        number = self.servers.ask_coordinator(join, waits_for=self._beginning())
        pause = PAUSE
        while True:
            seen = self.news.count
            self.news.raise_failure()
            self.refresh()
            for shard in self.view.active:
                count = self.servers.ask_head(shard, messages.CountOf(number))
                if isinstance(count, int):
                    self.servers.reached((number,))
                    with self._acting():
                        self.number = number
                        self.next = self._first = count
                    return
            self.servers.found_nobody((number,), f"that knows trainer {number}")
            self.news.wait(seen, pause)
            pause = min(pause * 1.5, LONGEST_PAUSE)

    def count_samples(self, name: str, text: str) -> str:
        """Has the samples of a sampler counted; returns what the first to name it said it is."""
        found: str = self.servers.ask_coordinator(orders.CountSamples(name, text))
        self.refresh()
        return found

    def account_of(self, sampler: str) -> Account:
        """The account of the samples of a sampler."""
        while True:
            self.news.raise_failure()
            seen, shard = self.news.count, self.view.active[0]
            answer = self.servers.ask_head(shard, messages.AccountOf(shard, sampler))
            with self._acting():
                if isinstance(answer, Counted) and self.view.shard(shard) is not None:
                    self.servers.reached(sampler)
                    self.deals = answer.deals
                    return answer.account
            self.servers.found_nobody(sampler, f"that keeps the account of sampler {sampler!r}")
            self.news.wait(seen, PAUSE)
            self.refresh()

    def _beginning(self) -> str:
        """For whom a trainer waits that joins, as far as it knows."""
        said = int(self.view.settings.get("trainers", 1))
        told = f"ps.connect(trainers={said})" if said else f"{self._started} had been started"
        return f"the trainers with which cluster {self.cluster!r} begins ({told})"

    def finish(self) -> None:
        """Pushes the last push, and leaves when it is safe everywhere."""
        with self._naming_all_lost(), self._acting():
            self._raise_failure()
            self._finishing = True
        number, _ = self.send(Whole(PushKind.FINISH))
        self._await_last_push(number)
        with self._acting():
            refused, self._errors = list(self._errors.values()), {}
        generation = self.view.generation
        try:
            leave = orders.Leave(self.number, generation, self._first, number)
            self.servers.ask_coordinator(leave, waits_for="servers to let this trainer go")
        except errors.ParameterServerError:
            self.refresh()
            with self._naming_all_lost(), self._acting():
                self._raise_failure()  # the cluster went back in the middle of this
            raise
        self.number = -1
        if refused:
            raise refused[0]

    def _await_last_push(self, number: int) -> None:
        """Waits until a push is safe, and says in the log at which servers it is not."""
        log = extend.WaitLog(time.monotonic())
        while True:
            try:
                self._await(lambda: self._is_settled(number), log.next_at() - time.monotonic())
                break
            except TimeoutError:
                pass
            if log.is_due(now := time.monotonic()):
                _logger.warning(
                    "finish has waited %.0f s until the pushes of trainer %r are safe at %s",
                    now - log.began, self.client.name, self._not_safe(number),
                )  # fmt: skip
        self._raise_error_of(number)

    def _not_safe(self, number: int) -> str:
        """The servers that have not said of a push that it is safe."""
        with self._condition:
            shards = self._kept.missing(number)
            heads = [self.view.shard(shard) for shard in shards]
        names = {each.head.name for each in heads if each is not None and each.chain}
        return ", ".join(sorted(names)) or "servers that are to take the place of lost ones"
