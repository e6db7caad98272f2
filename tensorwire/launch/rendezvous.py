"""The rendezvous backend ``tensorwire``: agents come and go without stopping the others.

Owns the store that the agents share, the number of each, and the signs of life that they
give. Torch knows it by an entry point of this package, so ``torchrun --rdzv-backend
tensorwire`` has it, too. Its options (``--rdzv-conf``) are torch's own (``is_host``,
``join_timeout``, ``read_timeout``, ``keep_alive_interval``, ``keep_alive_max_attempt``) and
``key_file``, the file with the job's key.

With a key nobody else can read or write anything here (``rpc.group.store_gate``), and all values
are signed. Torch's agent is given a client of ours, as torch's own cannot prove a key; workers'
``MASTER_ADDR`` names a store of torch's, in which nothing of ours lies.

Keys, apart for each job: ``nodes`` counts those that ever came, ``beat/N`` the signs of life
of node N, ``gone/N`` says that it left, ``closed`` that nobody may come any more, ``first`` how
many began together, ``torchs`` where torch's store is.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from rpc.errors import BringUpError, RpcError
from rpc.extend import (
    KEY_FILE,
    EtcdStoreClient,
    KeyValueStore,
    StoreClient,
    StoreServer,
    WaitLog,
    address_on_the_way_to,
    describe_addresses,
    host_addresses,
    host_store,
    key_values,
    outward_address,
    read_group_key,
    resolve_host,
)
from tensorwire.launch.endpoint import Host, Place, find_place, is_loopback
from tensorwire.launch.silence import Silence
from tensorwire.launch.variables import group_url

_logger = logging.getLogger("rpcrun")

JobStore = StoreClient | EtcdStoreClient
"""A client of the store in which a job's values lie."""

BACKEND = "tensorwire"
DEFAULT_PORT = 29400
LOOPBACK = "127.0.0.1"

NAMESPACE = "rpcrun"
"""The namespace of the launcher's values in the job's store."""
_BARRIER = "torchelastic/agent/terminal_state/num_members"
"""The key by which torch counts arrivals at the end of a job."""

_JOIN_SECONDS = 600
_READ_SECONDS = 60
_BEAT_SECONDS = 1
_BEATS_MISSED = 5
_LOOK_SECONDS = 0.05
_SECONDS_BETWEEN_TRIES = 0.2
_SECONDS_OF_AN_ATTEMPT = 1.5
"""Seconds after which a question that the store did not answer is asked over another connection."""
_LONGEST_ATTEMPT = 2.0
_TOLD_AT, _TOLD_EVERY = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0), 10.0
_SECONDS_TO_STOP = 5.0
_SECONDS_FOR_HOST = 1.0
"""Seconds for the agent that hosts the endpoint, if it is one of this job's, to say so."""


def create_handler(params: RendezvousParameters) -> TensorWireRendezvous:
    """Makes the handler for what torchrun's parser read."""
    return TensorWireRendezvous(params)


def entry_point() -> object:
    """Answers torch's registry: returns the function that makes handlers."""
    return create_handler


class TensorWireRendezvous(RendezvousHandler):
    """One agent's place in the rendezvous of a job.

    Args:
        params: as torchrun's parser makes them.

    Raises:
        RendezvousConnectionError: the store's host does not answer.

    Attributes:
        is_last: when the agent left the job no other was in it; None if nobody has said.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._run_id = params.run_id
        self._min, self._max = params.min_nodes, params.max_nodes
        self._join_seconds = params.get_as_int("join_timeout", _JOIN_SECONDS) or _JOIN_SECONDS
        self._read_seconds = params.get_as_int("read_timeout", _READ_SECONDS) or _READ_SECONDS
        self.beat_seconds = float(params.get("keep_alive_interval", _BEAT_SECONDS))
        self.silence_seconds = self.beat_seconds * int(
            params.get("keep_alive_max_attempt", _BEATS_MISSED)
        )
        self.is_last: bool | None = None
        self._endpoint = self._host = ""
        self._port = DEFAULT_PORT
        self._read_endpoint(params)
        self._is_host = params.get_as_bool("is_host")
        self._local_addr = params.local_addr
        self._server: StoreServer | None = None
        self._torchs: StoreServer | None = None
        self.group_key = _read_key(params.get("key_file"))
        self._store = self._open()
        self._values = key_values(self._store, self.group_key, NAMESPACE)
        if self.is_hosting:
            self._values.compare_and_set("torchs", None, f"{self._host} {self._port}".encode())
            self._warn_if_exposed()
        self._number: int | None = None
        self._first = 0
        self._beat: _Heartbeat | None = None

    def _read_endpoint(self, params: RendezvousParameters) -> None:
        """Takes what ``--rdzv-endpoint`` says."""
        host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
        self._endpoint, self._port, self._host = host, port, host

    def _open(self) -> JobStore:
        """Hosts the store, or waits for who does."""
        began = time.monotonic()
        log = WaitLog(began, _TOLD_AT, _TOLD_EVERY)
        while True:
            place = self._find_place()
            self._host = place.told
            store = self._host_it() if place.is_here else None
            if store is not None:
                return store
            problem = self._unreachable(place)
            if not problem:
                return self._connect()
            now = time.monotonic()
            if now - began >= self._join_seconds:
                raise RendezvousConnectionError(f"{problem}; waited {self._join_seconds} s")
            if log.is_due(now):
                left = self._join_seconds - (now - began)
                _logger.warning("%s; gives up in %.0f s", problem, left)
            time.sleep(_SECONDS_BETWEEN_TRIES)

    def _find_place(self) -> Place:
        """Finds the store, as this host sees it now: names and addresses may come later."""
        try:
            resolved = resolve_host(self._endpoint)
        except OSError:
            resolved = []
        mine = host_addresses()
        names = [socket.gethostname(), socket.getfqdn()] if not resolved else []
        host = Host(mine, names, self._local_addr or outward_address(mine))
        return find_place(self._endpoint, resolved, host, self._min, self._is_host)

    def _host_it(self) -> StoreClient | None:
        """The store, hosted here; None if another process listens at its port."""
        try:
            server = host_store(
                LOOPBACK if is_loopback(self._endpoint) else self._endpoint,
                self._port,
                self.group_key,
            )
        except (OSError, BringUpError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE and not self._is_host:
                return None
            raise RendezvousConnectionError(
                f"the store of the rendezvous cannot be hosted at {self._endpoint}:{self._port}: "
                f"{error}"
            ) from error
        store = server.client(self._read_seconds, self._run_id)
        self._server, self._port = server, server.port
        if self._host not in (self._endpoint, LOOPBACK):
            _logger.info(
                "%s stands for this host's loopback interface here; its workers are told %s, as "
                "--local-addr may say otherwise",
                self._endpoint,
                self._host,
            )
        return store

    def _unreachable(self, place: Place) -> str:
        """Tells why nobody can be reached at the endpoint; empty if somebody can."""
        where = f"{self._endpoint}:{self._port}"
        try:
            socket.create_connection((self._host, self._port), _LONGEST_ATTEMPT).close()
        except OSError as error:
            why = f"{error.strerror or error}"
        else:
            return ""
        mine = describe_addresses(host_addresses())
        if place.is_here:
            return f"another process of this host listens at {where}, and does not answer ({why})"
        return f"nobody hosts the store at {where} yet ({why}); this host's addresses are {mine}"

    def _connect(self, seconds: float = 0.0) -> JobStore:
        """Another connection to the store, of which a request may take so long.

        Raises:
            RendezvousConnectionError: it was given another key, or is none of ours.
        """
        seconds = seconds or self._read_seconds
        client = StoreClient(self._host, self._port, seconds, self.group_key, self._run_id)
        client.attempt = _SECONDS_OF_AN_ATTEMPT
        try:
            client.connect()
            if not self.group_key and client.has_closed_part():
                raise OSError("its jobs have a key, and this agent was given none")
        except OSError as error:
            raise RendezvousConnectionError(
                f"what listens at {self._host}:{self._port} is no store of a rendezvous of this "
                f"job, or does not answer; name another --rdzv-endpoint, or give all agents the "
                f"same key ({error})"
            ) from error
        return client

    def _warn_if_exposed(self) -> None:
        if not self.group_key and not is_loopback(self._endpoint):
            _logger.warning(
                "the store of the rendezvous at %s:%s asks nobody for a key: whoever reaches it "
                "can end this job, or have agents and workers of his own take part in it. Make a "
                "key (head -c 32 /dev/urandom | base64 > key; chmod 600 key) and give all agents "
                "--rdzv-conf key_file=key, or rpcrun --group-key-file key",
                self._endpoint,
                self._port,
            )

    # --- What RoleAgent uses beyond torch's interface

    @property
    def job_store(self) -> JobStore:
        """This job's part of the store, which all of its agents share, however late they came."""
        return self._store

    @property
    def max_nodes(self) -> int:
        """The number of nodes that there can be at a time."""
        return self._max

    @property
    def values(self) -> KeyValueStore:
        """The launcher's values there."""
        return self._values

    @property
    def group_url(self) -> str:
        """The URL at which the workers' group meets."""
        return group_url(self._host, self._port, self._run_id)

    @property
    def join_seconds(self) -> float:
        """The time to wait for other nodes."""
        return float(self._join_seconds)

    @property
    def is_hosting(self) -> bool:
        """True if this process hosts the store, which ends with it."""
        return self._server is not None

    def beats(self, nodes: Iterable[int]) -> Mapping[int, int]:
        """Signs of life so far, by node."""
        numbers = list(nodes)
        counts = self._values.counts([f"beat/{node}" for node in numbers]) if numbers else []
        return dict(zip(numbers, counts, strict=True))

    # --- Torch's interface

    def get_backend(self) -> str:
        """The name of this backend."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """True: workers may use the store."""
        return True

    def get_run_id(self) -> str:
        """The id of the job."""
        return self._run_id

    def is_closed(self) -> bool:
        """True if nobody may come any more."""
        return self._values.get("closed") is not None

    def set_closed(self) -> None:
        """Lets nobody come any more."""
        self._values.set("closed", b"1")

    def num_nodes_waiting(self) -> int:
        """0, as those who come disturb nobody."""
        return 0

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until there are enough nodes, and room for this one.

        Raises:
            RendezvousTimeoutError: there were too few for too long.
            RendezvousClosedError: the job is over.
            RendezvousGracefulExitError: it ended while this node waited for room.
        """
        if self._number is None:
            self._enter()
        assert self._number is not None
        is_late = self._number >= self._first
        if is_late:
            # Torch's way to number workers without the other agents.
            os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
        size = max(self._first, self._number + 1)
        host, port = self._torchs_place()
        meeting = RendezvousStoreInfo(host, port)
        return RendezvousInfo(self._control(is_late), self._number, size, meeting)

    def _torchs_place(self) -> tuple[str, int]:
        """The place of torch's store: at the endpoint, unless another job's agent hosts that."""
        deadline = time.monotonic() + _SECONDS_FOR_HOST
        while (place := self._values.get("torchs")) is None:
            if time.monotonic() > deadline:
                mine = address_on_the_way_to(self._host, self._port) or LOOPBACK
                self._torchs = host_store(mine, 0)
                told = f"{mine} {self._torchs.port}".encode()
                place = self._values.compare_and_set("torchs", None, told) or told
                break
            time.sleep(_LOOK_SECONDS)
        host, _, port = place.decode().rpartition(" ")
        return host, int(port)

    def _control(self, is_late: bool) -> Store:
        if not is_late:
            return self._store
        store = PrefixStore(f"late/{self._number}", self._store)
        store.add(_BARRIER, self._number or 0)  # the others do not wait for a late one, nor it
        return store

    def _enter(self) -> None:
        if self.is_closed():
            raise RendezvousClosedError(f"the job {self._run_id!r} is over")
        self._number = self._values.add("nodes") - 1
        values = key_values(self._connect(_SECONDS_OF_AN_ATTEMPT), self.group_key, NAMESPACE)
        key, patience = f"beat/{self._number}", float(self._read_seconds)
        self._beat = _Heartbeat(values, key, self.beat_seconds, patience)
        try:
            self._wait_for_others()
        except BaseException:
            self.shutdown()
            raise

    def _wait_for_others(self) -> None:
        assert self._number is not None
        silence = Silence(self.silence_seconds)
        log = WaitLog(time.monotonic(), _TOLD_AT, _TOLD_EVERY)
        deadline = time.monotonic() + self._join_seconds
        while True:
            present = self._present(silence)
            if self._max <= sum(node < self._number for node in present):
                if self.is_closed():
                    raise RendezvousGracefulExitError("the job ended while this node waited")
                self._refuse_if_full(present, silence)
                if log.is_due(time.monotonic()):
                    _logger.warning("%d agents are there; this one waits for room", self._max)
                deadline = time.monotonic() + self._join_seconds
            elif len(present) >= self._min or self._values.get("first") is not None:
                count = b"%d" % len(present)
                self._first = int(self._values.compare_and_set("first", None, count) or count)
                return
            elif time.monotonic() > deadline:
                raise RendezvousTimeoutError(
                    f"{len(present)} of the {self._min} agents that --nnodes asks for came within "
                    f"{self._join_seconds} s"
                )
            elif log.is_due(time.monotonic()):
                left = deadline - time.monotonic()
                _logger.warning(
                    "%d of %d agents are there; the others are to come to %s; gives up in %.0f s",
                    len(present),
                    self._min,
                    self._where(),
                    left,
                )
            time.sleep(_LOOK_SECONDS)

    def _refuse_if_full(self, present: Sequence[int], silence: Silence) -> None:
        """Raises if all agents of a job of a fixed size are there, and live.

        Elastic jobs have room for one that waits until another dies.
        """
        others = [node for node in present if node != self._number]
        if self._min == self._max and silence.has_heard(others):
            raise RendezvousConnectionError(
                f"the job {self._run_id!r} runs at {self._where()} with all of its {self._max} "
                "agents: give this one another --rdzv-id, or end that one first"
            )

    def _where(self) -> str:
        """The address of the store, and of the host if that is this one."""
        where = f"{self._endpoint}:{self._port}"
        if self._server is None:
            return where
        return f"{where}, on this host ({describe_addresses(host_addresses())})"

    def _present(self, silence: Silence) -> list[int]:
        """The nodes that came, are not gone, and give signs of life."""
        here = self._here()
        silent = silence.hear(time.monotonic(), self.beats(here))
        return [node for node in here if node not in silent]

    def _here(self) -> list[int]:
        """The nodes that came and have not said that they are gone."""
        came = range(self._values.counts(["nodes"])[0])
        return [node for node in came if self._values.get(f"gone/{node}") is None]

    def shutdown(self) -> bool:
        """Leaves the rendezvous."""
        if self._beat is not None:
            self._beat.stop()
            self._beat = None
        if self._number is not None:
            with contextlib.suppress(RpcError):  # the store may have ended first
                self._values.set(f"gone/{self._number}", b"1")
        return True


class _Heartbeat:
    """Gives signs of life on a thread and a connection of its own.

    One that fails is given again, over another connection, until the patience is at an end: a
    cable that was cut may be mended.
    """

    def __init__(self, values: KeyValueStore, key: str, seconds: float, patience: float) -> None:
        self._values, self._key, self._seconds = values, key, seconds
        self._patience = patience
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rpcrun-beat", daemon=True)
        self._values.add(key)
        self._thread.start()

    def _run(self) -> None:
        heard = time.monotonic()
        while not self._over.wait(self._seconds):
            try:
                self._values.add(self._key)
                heard = time.monotonic()
            except RpcError as error:
                if self._over.is_set() or time.monotonic() - heard > self._patience:
                    return  # whoever reads the plan says that the store is gone
                _logger.debug("no sign of life could be given: %s", error)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(_SECONDS_TO_STOP)


def _read_key(file: str | None) -> bytes:
    """The job's key, which the workers, too, find in that file, or where the environment says.

    Raises:
        ValueError: there is none in that file, or others may read it.
    """
    if file:
        os.environ[KEY_FILE] = os.path.abspath(file)
    return read_group_key(os.environ)
