"""Bring-up: how workers find each other through a c10d ``Store``.

Decides when a group is complete, and what is wrong when it is not. Connecting
to the peers found is the transports' business; records are JSON, never pickled.

A static group meets in rounds, so that workers may shut down and meet again on
one store: a rank's n-th meeting is round n, unless that round ended without it.
Whoever sees that a round is complete, or cannot become so, writes its verdict,
for which all others wait. So a worker makes a fixed number of requests to the
store and one bulk read, and an error reaches everyone at once.

Members of a dynamic group come and go: each name has a key with its worker's
record, in whose place it says later whether that worker left or was lost. A rank has
a claim, the name and the incarnation, which says so until it is confirmed.

Keys, under ``tensorwire/``: ``mode``; ``incarnation/NAME`` and
``incarnation-of-rank/RANK`` count lives; ``round/RANK`` a rank's latest round and who
claims it there;
``ROUND/...`` belongs to one round; ``member/NAME``, ``id/RANK`` and ``names/N`` to the
dynamic group, in which ``joined`` counts names and ``changes`` comings and goings.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import DistNetworkError
from torch.distributed.rendezvous import rendezvous

from rpc.constants import MAX_RANK
from rpc.errors import BringUpError, RpcError
from rpc.messages import PROTOCOL_VERSION

T = TypeVar("T")

_PREFIX = "tensorwire"
_COMPLETE = "complete"
_STATIC, _DYNAMIC = "static", "dynamic"
_NOBODY = "!"
"""In the place of the name that has a rank, and at the start of what follows a member's record."""
_LEFT, _LOST = f"{_NOBODY}left", f"{_NOBODY}lost"
_JOINING = " joining"
_NOT_GIVEN = "-1"
_MUST_AGREE = ("world_size", "backend", "protocol")
_SECONDS_TO_CONCLUDE = 5.0
_SECONDS_TO_STOP = 2.0


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class Record:
    """What a worker tells the others when it joins.

    Args:
        name: the worker's.
        rank: its id.
        world_size: how many workers it expects; None in a dynamic group.
        incarnation: which life of that name this is; see ``next_incarnation``.
        backend: the backend it uses.
        address: where its transport can be reached; the transport's own format.
        protocol: the version of the messages it speaks.
        process: where it runs, for people.
        extras: anything else that JSON can hold.
    """

    name: str
    rank: int
    world_size: int | None
    incarnation: int
    backend: str
    address: bytes
    protocol: int = PROTOCOL_VERSION
    process: str = field(default_factory=_this_process)
    extras: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """As bytes for the store."""
        fields = asdict(self)
        fields["address"] = base64.b64encode(self.address).decode()
        return json.dumps(fields).encode()

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """The inverse of :meth:`encode`.

        Raises:
            BringUpError: something else wrote to the store under our keys.
        """
        try:
            fields: dict[str, Any] = json.loads(data)
            fields["address"] = base64.b64decode(fields["address"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise BringUpError(
                f"the store holds something else than a record of this version: {error}"
            ) from error

    def __str__(self) -> str:
        return f"{self.name!r} (rank {self.rank}, {self.process})"


def open_store(
    init_method: str, rank: int, world_size: int | None, timeout: float
) -> tuple[Store, int, int | None]:
    """Connects to the store that ``init_method`` names; hosts it, if this is the place.

    The same URL may serve ``init_process_group`` in the same process.

    Args:
        init_method: ``env://``, ``tcp://host:port`` or ``file:///path``.
        rank: this worker's, or -1 to take it from the URL or, with ``env://``, from ``RANK``.
        world_size: likewise; None to take it from the URL or ``WORLD_SIZE``.
        timeout: seconds to wait for the store's host.

    Returns:
        The store, the rank and the world size, which is None for a dynamic group.

    Raises:
        ValueError: something that is needed is given nowhere.
        BringUpError: the store's host does not answer, or cannot be it.
    """
    parts = urlsplit(init_method)
    query = dict(parse_qsl(parts.query))
    if rank >= 0:
        query["rank"] = str(rank)
    if world_size is not None and world_size > 0:
        query["world_size"] = str(world_size)
    elif parts.scheme == "env" and os.environ.get("WORLD_SIZE"):
        query.setdefault("world_size", os.environ["WORLD_SIZE"])
    size = int(query.get("world_size", _NOT_GIVEN))
    # A TCP store told how many to expect would wait for them itself, and not say who is missing.
    query["world_size"] = str(size) if parts.scheme == "file" else _NOT_GIVEN
    url = urlunsplit(parts._replace(query=urlencode(query)))
    if rank >= 0:
        _check_rank(rank, size)
    folder = os.path.dirname(parts.path)
    if parts.scheme == "file" and not os.path.isdir(folder):
        raise BringUpError(
            f"init_method={init_method!r} names a file in a folder that does not exist: {folder!r}"
        )
    store, rank, _ = _connect(url, init_method, timeout)
    _check_rank(rank, size)
    return store, rank, size if size > 0 else None


def _check_rank(rank: int, size: int) -> None:
    if not 0 <= rank < (size if size > 0 else rank + 1):
        raise ValueError(f"rank={rank} must be from 0 to world_size - 1, which is {size - 1}")
    if rank > MAX_RANK:
        raise ValueError(f"rank={rank} must be from 0 to {MAX_RANK}, the highest there can be")


def _connect(url: str, init_method: str, timeout: float) -> tuple[Store, int, int]:
    wait = timedelta(seconds=timeout)
    found: tuple[Store, int, int]
    try:
        found = within(timeout, lambda: next(rendezvous(url, timeout=wait)))
    except RuntimeError as error:
        if "No rendezvous handler" in str(error):
            raise ValueError(
                f"init_method={init_method!r} has a scheme that is not known; "
                "use env://, tcp://host:port or file:///path"
            ) from error
        raise BringUpError(
            f"the store at init_method={init_method!r} could not be opened within {timeout:g} s; "
            "a worker with rank 0 must be running at that address, or the file be writable: "
            f"{error}"
        ) from error
    except AssertionError as error:
        raise ValueError(f"init_method={init_method!r} is incomplete: {error}") from error
    found[0].set_timeout(wait)
    return found


def within(
    timeout: float,
    ask: Callable[[], T],
    given_up: threading.Event | None = None,
    undo: Callable[[], object] | None = None,
) -> T:
    """Returns ``ask()``, which makes requests to the store, or gives up waiting for it.

    A store whose host is frozen never answers; the thread that waits for it is left behind.

    Args:
        timeout: seconds.
        ask: what to do.
        given_up: set when nobody waits for ``ask`` any more, which may look at it.
        undo: called if ``ask`` returns, but its caller does not hear of it.

    Raises:
        BringUpError: the time is over.
    """
    outcome: Future[T] = Future()
    asking = threading.Thread(
        target=_settle, args=(outcome, ask, undo), name="rpc-rendezvous", daemon=True
    )
    asking.start()
    try:
        wait([outcome], timeout)
    except BaseException:  # such as Ctrl-C
        if outcome.cancel():
            _give_up(given_up)
        elif undo is not None and outcome.exception() is None:
            undo()
        raise
    if outcome.cancel():
        _give_up(given_up)
        raise BringUpError(
            f"the store did not answer within {timeout:g} s; is the worker that hosts it, "
            "usually rank 0, frozen or cut off?"
        )
    return outcome.result()


def _settle(outcome: Future[T], ask: Callable[[], T], undo: Callable[[], object] | None) -> None:
    try:
        result = ask()
    except BaseException as error:
        with contextlib.suppress(InvalidStateError):
            outcome.set_exception(error)
        return
    try:
        outcome.set_result(result)
    except InvalidStateError:
        if undo is not None:
            undo()


def _give_up(given_up: threading.Event | None) -> None:
    if given_up is not None:
        given_up.set()


def next_incarnation(store: Store, name: str, rank: int) -> int:
    """The number of the life that ``name`` begins now: higher than any of this name or rank.

    Raises:
        BringUpError: the store was lost.
    """
    counters = (f"incarnation/{name}", f"incarnation-of-rank/{rank}")
    with _names_store_loss():
        ours = _ours(store)
        counts = {counter: ours.add(counter, 1) for counter in counters}
        life: int = max(counts.values())
        for counter, count in counts.items():
            if count < life:
                ours.add(counter, life - count)
        return life


def meet(store: Store, me: Record, timeout: float) -> list[Record]:
    """Publishes ``me`` and waits for the records of all other ranks of a static group.

    Args:
        store: where the workers meet.
        me: this worker; its ``world_size`` says how many records there will be.
        timeout: seconds.

    Returns:
        The records of all ranks, in the order of their ranks.

    Raises:
        BringUpError: ranks are missing at the deadline, two processes claim one rank, two
            workers have one name, or workers disagree about the world size, the backend
            or the protocol; names them.
    """
    if me.world_size is None:
        raise ValueError(f"{me} has no world size; use join for a dynamic group")
    meeting = _Meeting(store, me, timeout)
    try:
        return within(timeout + _SECONDS_TO_CONCLUDE, meeting.hold, meeting.given_up)
    except KeyboardInterrupt:
        meeting.interrupt()
        raise


class _Meeting:
    """One worker's way through :func:`meet`."""

    def __init__(self, store: Store, me: Record, timeout: float) -> None:
        self.given_up = threading.Event()
        self._store = store
        self._me = me
        self._timeout = timeout
        self._round: _Round | None = None

    def hold(self) -> list[Record]:
        """See :func:`meet`."""
        me, deadline = self._me, time.monotonic() + self._timeout
        with _names_store_loss():
            _set_mode(_ours(self._store), _STATIC)
            self._round = meeting = _enter(_ours(self._store), me)
            if self.given_up.is_set():
                meeting.conclude(self._interrupted())
            elif meeting.arrive(me):
                meeting.conclude(_COMPLETE)
            verdict = meeting.await_verdict(deadline)
            if verdict is None:
                verdict = meeting.conclude(meeting.describe_missing(me, self._timeout))
            if verdict != _COMPLETE:
                raise BringUpError(verdict)
            return meeting.records(range(me.world_size or 0))

    def interrupt(self) -> None:
        """Ends the round, for everybody, that this worker does not wait for any more."""
        if self._round is not None:
            number = self._round.number
            with contextlib.suppress(RuntimeError):
                within(_SECONDS_TO_STOP, lambda: self._conclude_elsewhere(number))

    def _conclude_elsewhere(self, number: int) -> None:
        """On a connection of its own, which torch 2.6 cannot make, as the other one waits."""
        clone: Callable[[], Store] | None = getattr(self._store, "clone", None)
        store = self._store if clone is None else clone()
        _Round(_ours(store), number).conclude(self._interrupted())

    def _interrupted(self) -> str:
        return f"{self._me} was interrupted while it waited for the others"


class _Round:
    """One attempt of a static group to form."""

    def __init__(self, store: Store, number: int) -> None:
        self.number = number
        self._group = store
        self._store: Store = PrefixStore(str(number), store)

    def verdict(self) -> str | None:
        """What became of it, if that is known."""
        return _text(self._store.get("verdict")) if self._store.check(["verdict"]) else None

    def conclude(self, verdict: str) -> str:
        """Writes the verdict, unless there is one; returns what it is then."""
        return _text(self._store.compare_set("verdict", "", verdict))

    def await_verdict(self, deadline: float) -> str | None:
        """Returns the verdict, or None at the deadline."""
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            self._store.wait(["verdict"], left)
        except DistNetworkError:
            raise
        except RuntimeError:
            return None
        return _text(self._store.get("verdict"))

    def arrive(self, me: Record) -> bool:
        """Publishes ``me`` and compares it with others; returns whether everybody is here."""
        record = me.encode().decode()
        for problem in self._problems(me, record):
            self._store.set("disagreement", problem)
            self.conclude(problem)
        self._store.set(f"record/{me.rank}", record)
        arrived: int = self._store.add("arrived", 1)
        return arrived == me.world_size

    def _problems(self, me: Record, record: str) -> Iterator[str]:
        first = Record.decode(self._store.compare_set("first", "", record))
        for what in _MUST_AGREE:
            ours, theirs = getattr(me, what), getattr(first, what)
            if ours != theirs:
                yield (
                    f"the workers disagree about {what}: "
                    f"{first.name} says {theirs}, {me.name} says {ours}"
                )
        namesake = Record.decode(self._store.compare_set(f"name/{me.name}", "", record))
        if namesake.rank != me.rank:
            yield f"RPC worker name {me.name} is not unique: it is claimed by {namesake} and {me}"

    def raise_problems(self, rank: int) -> None:
        """Raises why it ended before ``rank``, whose round it is, could come.

        A latecomer shares what those who came disagreed about.
        """
        for problem in (f"claimed/{rank}", "disagreement"):
            if self._store.check([problem]):
                raise BringUpError(_text(self._store.get(problem)))

    def refuse_beside(self, other: Record, me: Record) -> None:
        """Raises if ``me`` was begun before the round of its rank, ``other``'s, had ended."""
        problem = (
            f"rank {me.rank} is claimed by two processes, {other} and {me}: either both were "
            "started with this rank, or the first died while the group was forming"
        )
        if self.verdict() is None:
            self._store.compare_set(f"begun/{me.rank}", "", str(_latest_life(self._group, me.rank)))
            self._store.set(f"claimed/{me.rank}", problem)
            self.conclude(problem)
        elif me.incarnation > self._begun(me.rank):
            return
        raise BringUpError(problem)

    def _begun(self, rank: int) -> int:
        """The latest life of ``rank`` when two were seen to claim it; 0 if none were."""
        key = f"begun/{rank}"
        return int(_text(self._store.get(key))) if self._store.check([key]) else 0

    def records(self, ranks: Iterable[int]) -> list[Record]:
        """The records of ``ranks``, which must be there."""
        return [Record.decode(each) for each in _read(self._store, "record/", ranks)]

    def describe_missing(self, me: Record, timeout: float) -> str:
        """What to tell everyone when ``me`` gives up."""
        ranks = range(me.world_size or 0)
        came = [rank for rank in ranks if self._store.check([f"record/{rank}"])]
        missing = [rank for rank in ranks if rank not in came]
        present = ", ".join(str(record) for record in self.records(came))
        return (
            f"{len(missing)} of {me.world_size} workers did not come within {timeout:g} s: "
            f"missing ranks {missing}; there were {present}"
        )


def _enter(store: Store, me: Record) -> _Round:
    """The first round, from this rank's next on, that did not end before it came."""
    record, number, last = me.encode().decode(), 1, ""
    while True:
        claim = f"{number} {record}"
        found = _text(store.compare_set(f"round/{me.rank}", last, claim))
        if found == claim:
            meeting = _Round(store, number)
            if meeting.verdict() is None:
                return meeting
            meeting.raise_problems(me.rank)
        else:
            latest, _, other = found.partition(" ")
            number = int(latest)
            _Round(store, number).refuse_beside(Record.decode(other.encode()), me)
        number, last = number + 1, found


def _latest_life(store: Store, rank: int) -> int:
    """The highest incarnation that a worker of this rank has begun."""
    life: int = store.add(f"incarnation-of-rank/{rank}", 0)
    return life


# --- Dynamic groups


def join(store: Store, me: Record) -> None:
    """Makes ``me`` a member of the dynamic group on ``store``.

    A worker that comes back, under the same name and rank, takes its own place.

    Raises:
        BringUpError: the group is a static one, the name or the rank belongs to another
            member, or to a later life, or members use another backend or protocol.
    """
    with _names_store_loss():
        ours = _ours(store)
        _set_mode(ours, _DYNAMIC)
        first = Record.decode(ours.compare_set("first", "", me.encode().decode()))
        for what in _MUST_AGREE:
            if getattr(me, what) != getattr(first, what):
                raise BringUpError(
                    f"the workers disagree about {what}: {first.name} says "
                    f"{getattr(first, what)}, {me.name} says {getattr(me, what)}"
                )
        _claim_rank(ours, me)
        _claim_name(ours, me)
        _confirm_rank(store, me)
        ours.add("changes", 1)


def leave(store: Store, me: Record) -> None:
    """Ends this worker's membership; does nothing if this life of it is no member any more."""
    _end(store, me, _LEFT)


def strike_off(store: Store, lost: Record) -> None:
    """Ends the membership of a worker that was lost, likewise."""
    _end(store, lost, _LOST)


def has_left(store: Store, member: Record) -> bool:
    """Whether that life, the last of its name, left of its own accord."""
    with _names_store_loss():
        ours, key = _ours(store), f"member/{member.name}"
        return bool(ours.check([key])) and _text(ours.get(key)) == _mark(_LEFT, member)


def _end(store: Store, member: Record, how: str) -> None:
    with _names_store_loss():
        ours = _ours(store)
        record = member.encode().decode()
        if _value(ours, f"member/{member.name}") == record:
            ours.compare_set(f"member/{member.name}", record, _mark(how, member))
            ours.compare_set(f"id/{member.rank}", _claim(member), _NOBODY)
            ours.add("changes", 1)


def lookup(store: Store, who: str | int) -> Record | None:
    """The member with this name or rank, if there is one."""
    with _names_store_loss():
        ours = _ours(store)
        claim = _value(ours, f"id/{who}") if isinstance(who, int) else who
        name = claim.split(" ")[0] if claim else None
        record = _value(ours, f"member/{name}") if name else None
        return Record.decode(record.encode()) if record else None


def members(store: Store) -> list[Record]:
    """All members, in the order in which their names first joined."""
    with _names_store_loss():
        ours = _ours(store)
        slots = range(1, ours.add("joined", 0) + 1)
        names = [_text(name) for name in _read(ours, "names/", slots)]
        found = [_text(record) for record in _read(ours, "member/", names)]
        return [Record.decode(record.encode()) for record in found if _is_there(record)]


def changes(store: Store) -> int:
    """How often members came or went so far: one cheap request to see if to ask again."""
    with _names_store_loss():
        count: int = _ours(store).add("changes", 0)
        return count


def _claim(me: Record, how: str = "") -> str:
    return f"{me.name} {me.incarnation}{how}"


def _claim_rank(store: Store, me: Record) -> None:
    """Until it is confirmed, another worker may take the rank, which changes the claim."""
    key, mine = f"id/{me.rank}", _claim(me, _JOINING)
    holder = _text(store.compare_set(key, "", mine))
    while holder != mine:
        if _is_there(holder):
            _give_way(store, me, holder)
        holder = _text(store.compare_set(key, holder, mine))


def _give_way(store: Store, me: Record, holder: str) -> None:
    """Raises if the rank is that of another member, or of a later life."""
    name, incarnation, *_ = holder.split(" ")
    found = _value(store, f"member/{name}")
    member = None if found is None else Record.decode(found.encode())
    others = name != me.name and member is not None and member.rank == me.rank
    if others or int(incarnation) > me.incarnation:
        raise BringUpError(
            f"rank {me.rank} is claimed by two workers, {member or repr(name)} and {me}"
        )


def _confirm_rank(store: Store, me: Record) -> None:
    """Another worker may have taken the rank before our record was there to stop it."""
    key = f"id/{me.rank}"
    holder = _text(_ours(store).compare_set(key, _claim(me, _JOINING), _claim(me)))
    if holder != _claim(me):
        leave(store, me)
        name = holder.split(" ")[0]
        raise BringUpError(f"rank {me.rank} is claimed by two workers, {name!r} and {me}")


def _claim_name(store: Store, me: Record) -> None:
    record = me.encode().decode()
    key = f"member/{me.name}"
    if not store.check([key]):
        found = _text(store.compare_set(key, "", record))
        if found == record:
            store.set(f"names/{store.add('joined', 1)}", me.name)
            return
    found = _text(store.get(key))
    while found != record:
        try:
            _check_name(found, me)
        except BringUpError:
            store.compare_set(f"id/{me.rank}", _claim(me, _JOINING), _NOBODY)
            raise
        found = _text(store.compare_set(key, found, record))


def _check_name(found: str, me: Record) -> None:
    """Raises if the name is that of another rank, or of a later life."""
    if _is_there(found):
        other = Record.decode(found.encode())
        if other.rank != me.rank or other.incarnation > me.incarnation:
            raise BringUpError(
                f"RPC worker name {me.name} is not unique: it is claimed by {other} and {me}"
            )
    elif int(found.split(" ")[1]) > me.incarnation:
        raise BringUpError(
            f"RPC worker name {me.name} is not unique: another {me.name} joined later than "
            f"{me}, and is gone already"
        )


# --- The store


def _ours(store: Store) -> Store:
    return PrefixStore(_PREFIX, store)


def _set_mode(store: Store, mode: str) -> None:
    if _text(store.compare_set("mode", "", mode)) != mode:
        raise BringUpError(
            "RPC group mixes statically and dynamically initialized members which is not "
            "supported. Give every worker a world_size, or none."
        )


def _value(store: Store, key: str) -> str | None:
    """What a member's key holds, unless it is absent or left."""
    if not store.check([key]):
        return None
    value = _text(store.get(key))
    return value if _is_there(value) else None


def _read(store: Store, prefix: str, keys: Iterable[object]) -> list[bytes]:
    """Reads what there is of several keys, in one request if all are there."""
    wanted = [f"{prefix}{key}" for key in keys]
    if not wanted:
        return []
    if not store.check(wanted):
        wanted = [key for key in wanted if store.check([key])]
    return store.multi_get(wanted) if wanted else []


def _text(value: bytes) -> str:
    return value.decode()


@contextlib.contextmanager
def _names_store_loss() -> Iterator[None]:
    try:
        yield
    except RpcError:
        raise
    except RuntimeError as error:
        raise BringUpError(
            "the store was lost while workers were meeting; is the worker that hosts it, "
            f"usually rank 0, still running? ({error})"
        ) from error


def _mark(how: str, member: Record) -> str:
    return f"{how} {member.incarnation}"


def _is_there(value: str) -> bool:
    return not value.startswith(_NOBODY)
