"""A client of etcd v3 as the store of a group or of a job: no machine of the job hosts it.

Keys of a job lie under a prefix of their own, and belong to a lease that the job's agents keep
alive: when the last of them is gone for a minute, so are they. Changes are transactions. A member
of the etcd cluster that does not answer is left for the next one, until the time is over.

What may have been done before an answer was lost is asked for again; the signed values on top of
this (``signed_store``) put nothing that they did not compare first.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from rpc.group.etcd_watch import EtcdWatch
from rpc.group.own_store import OwnStore
from rpc.group.store_watch import SECONDS_BETWEEN_READS, StoreWatch
from rpc.group.tcp_store import StoreLostError

SCHEME: Final = "etcd"
DEFAULT_PORT: Final = 2379
LEASE_SECONDS: Final = 60
"""Seconds after which a job's keys go when no agent keeps them."""

_ROOT: Final = "/tensorwire"
_API: Final = "/v3/"
_RUN_KEY: Final = "run"
_RUN_BYTES: Final = 8
_MOST_OPERATIONS: Final = 100  # etcd's own limit is 128
_SECONDS_OF_AN_ATTEMPT: Final = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.5


class EtcdLostError(StoreLostError):
    """No member of the etcd cluster answered in time, or the job's keys are gone."""


@dataclass(frozen=True, slots=True)
class EtcdPlace:
    """The address of an etcd cluster, and how to prove who asks.

    Args:
        members: host and port of each member that may be asked.
        job: whose keys these are.
        ca: file with the certificate of the authority; https is spoken if there is one.
        cert: file with this client's certificate.
        cert_key: file with its key.
        user: name of a user of etcd's.
        password_file: file with its password.
    """

    members: tuple[tuple[str, int], ...]
    job: str = ""
    ca: str = ""
    cert: str = ""
    cert_key: str = ""
    user: str = ""
    password_file: str = ""

    @classmethod
    def parse(cls, url: str) -> EtcdPlace:
        """Reads ``etcd://host:port,host:port?job=ID&ca=FILE``.

        Raises:
            ValueError: it names no member, or a port that is none.
        """
        parts = urlsplit(url)
        query = dict(parse_qsl(parts.query))
        known = {
            name: query.get(name, "") for name in cls.__dataclass_fields__ if name != "members"
        }
        return cls(members_of(parts.netloc, url), **known)

    def url(self) -> str:
        """The inverse of :meth:`parse`."""
        members = ",".join(f"{_bracketed(host)}:{port}" for host, port in self.members)
        fields = {n: getattr(self, n) for n in self.__dataclass_fields__ if n != "members"}
        said = urlencode({name: value for name, value in fields.items() if value})
        return f"{SCHEME}://{members}" + (f"?{said}" if said else "")

    def __str__(self) -> str:
        return ",".join(f"{host}:{port}" for host, port in self.members)


def members_of(text: str, said: str) -> tuple[tuple[str, int], ...]:
    """Hosts and ports of the members of an etcd cluster; without a port etcd's usual one.

    Args:
        text: such as ``"etcd1:2379,etcd2:2379"``.
        said: the flag or URL that holds it, for errors.

    Raises:
        ValueError: there is none, or a port is no number; names ``said``.
    """
    members = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        parts = urlsplit(f"//{part}")
        try:
            port = parts.port or DEFAULT_PORT
        except ValueError as error:
            raise ValueError(f"{said!r}: {part!r} has no port that can be: {error}") from None
        if not parts.hostname:
            raise ValueError(f"{said!r}: {part!r} names no host")
        members.append((parts.hostname, port))
    if not members:
        raise ValueError(
            f"{said!r} names no member of an etcd cluster, as in etcd1:2379,etcd2:2379"
        )
    return tuple(members)


class EtcdStoreClient(OwnStore):
    """The keys of one job in an etcd cluster; any thread may use it, one at a time.

    Args:
        place: the cluster, and whose keys.
        timeout: seconds that one request may take, all members and attempts together.

    Raises:
        RuntimeError: ``etcd3gw`` is not installed.
    """

    def __init__(self, place: EtcdPlace, timeout: float) -> None:
        super().__init__(f"{_ROOT}/{quote(place.job, safe='')}" if place.job else _ROOT)
        self._place, self._seconds = place, timeout
        self._lock = threading.Lock()
        self._clients: list[Any] = []
        self._clients = _clients(place)
        self._current = 0
        self._tokens: dict[int, str] = {}
        self._run = b""
        self._lease = 0

    @property
    def place(self) -> EtcdPlace:
        """The cluster."""
        return self._place

    def connect(self) -> None:
        """Finds the job's run in etcd, or begins one.

        Raises:
            EtcdLostError: no member answers.
        """
        with self._lock:
            if not self._run:
                self._begin()

    @property
    def run(self) -> bytes:
        """Says which run of the job the store holds; 16 bytes."""
        self.connect()
        return self._run

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long one request may take."""
        self._seconds = timeout.total_seconds()

    # --- Requests, by torch's names

    def set(self, key: str, value: str | bytes) -> None:
        """Puts a value under a key; returns when it is there."""
        self._ask([{"request_put": self._put(key, _bytes(value))}])

    def get(self, key: str) -> bytes:
        """The value under a key, which is waited for."""
        self.wait([key], timedelta(seconds=self._seconds))
        return self._values([key])[0] or b""

    def check(self, keys: Sequence[str]) -> bool:
        """True if there are values under all these keys."""
        return all(value is not None for value in self._values(keys))

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Puts the desired value under a key that has the expected one; returns what is there."""
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        if expected == desired:
            stored = self._values([key])[0]
        else:
            stored = self._exchange(key, expected, desired)[1]
        return expected if stored is None else stored

    def compare_set_all(
        self, changes: Sequence[tuple[str, str | bytes, str | bytes]]
    ) -> list[bytes]:
        """Makes several compare-and-sets; those that change nothing are one round trip."""
        if all(_bytes(expected) == _bytes(desired) for _, expected, desired in changes):
            stored = self._values([key for key, _, _ in changes])
            pairs = zip(changes, stored, strict=True)
            return [_bytes(e) if value is None else value for (_, e, _), value in pairs]
        return [self.compare_set(*change) for change in changes]

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns what it is then."""
        while True:
            before = self._values([key])[0]
            count = int(before or b"0") + amount
            if not amount or self._exchange(key, before or b"", b"%d" % count)[0]:
                return count

    def delete_key(self, key: str) -> bool:
        """Deletes a key; True if it was there."""
        (answer,) = self._ask([{"request_delete_range": {"key": self._name(key)}}])
        return int(answer["response_delete_range"].get("deleted", 0)) == 1

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values under several keys, which must be there."""
        return [value or b"" for value in self._values(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Puts values under several keys, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Returns when there are values under all these keys.

        Raises:
            TimeoutError: the time is over.
        """
        if self.check(keys):
            return
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        deadline, pause, changed = time.monotonic() + seconds, _FIRST_PAUSE, threading.Event()
        with contextlib.closing(self.watch(keys, changed.set)) as watch:
            while not self.check(keys):
                left = min(deadline, self.until) - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"{list(keys)} were not there within {seconds:g} s")
                changed.wait(min(left, SECONDS_BETWEEN_READS if watch.stands else pause))
                changed.clear()  # before the keys are read, so that nothing later is missed
                pause = min(2 * pause, _LONGEST_PAUSE)

    def watch(self, keys: Sequence[str], told: Callable[[], None]) -> StoreWatch:
        """See ``OwnStore.watch``; a connection of its own for each."""
        return EtcdWatch(self._place, [f"{self.prefix}/{key}" for key in keys], told)

    def close(self) -> None:
        """Hangs up; the next request connects again."""
        for client in self._clients:
            client.session.close()

    __del__ = close  # as torch's clients, which nobody closes either

    # --- The job's lease

    def keep_alive(self) -> None:
        """Has the job's keys stay for another minute.

        Raises:
            EtcdLostError: no member answers, or they are gone already.
        """
        with self._lock:
            answer = self._post("lease/keepalive", {"ID": self._lease})
        if not int(answer.get("result", {}).get("TTL", 0)):
            raise EtcdLostError(
                f"the keys of the job {self._place.job!r} are gone from etcd at {self._place}: no "
                f"agent reached it for {LEASE_SECONDS} s"
            )

    def delete_job(self) -> None:
        """Deletes all keys of the job."""
        with self._lock, contextlib.suppress(EtcdLostError):
            self._post("lease/revoke", {"ID": self._lease})

    def _begin(self) -> None:
        """Reads the job's run and lease, or puts them there. Needs the lock."""
        key = _text(f"{self.prefix}/{_RUN_KEY}".encode())
        while True:
            entries = self._post("kv/range", {"key": key}).get("kvs", ())
            if entries:
                run, lease = base64.b64decode(entries[0]["value"]).split(b" ")
                self._run, self._lease = run, int(lease)
                return
            lease = self._post("lease/grant", {"TTL": LEASE_SECONDS, "ID": 0})["ID"]
            run = os.urandom(_RUN_BYTES).hex().encode()
            put = {"key": key, "value": _text(b"%s %d" % (run, int(lease))), "lease": lease}
            absent = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": 0}
            self._post("kv/txn", {"compare": [absent], "success": [{"request_put": put}]})

    # --- Transactions

    def _exchange(self, key: str, expected: bytes, desired: bytes) -> tuple[bool, bytes | None]:
        """Puts the desired value in the place of the expected one, empty for none.

        Returns:
            Whether it was put, and what is there now.
        """
        name = self._name(key)
        compare: dict[str, object] = {"key": name, "result": "EQUAL"}
        if expected:
            compare |= {"target": "VALUE", "value": _text(expected)}
        else:
            compare |= {"target": "CREATE", "create_revision": 0}
        with self._connected():
            put = [{"request_put": self._put(key, desired)}]
            read = [{"request_range": {"key": name}}]
            change = {"compare": [compare], "success": put, "failure": read}
            answer = self._post("kv/txn", change)
        if answer.get("succeeded"):
            return True, desired
        return False, _value(answer["responses"][0]["response_range"])

    def _values(self, keys: Sequence[str]) -> list[bytes | None]:
        answers = self._ask([{"request_range": {"key": self._name(key)}} for key in keys])
        return [_value(answer["response_range"]) for answer in answers]

    def _ask(self, operations: Sequence[Mapping[str, object]]) -> list[Mapping[str, Any]]:
        answers: list[Mapping[str, Any]] = []
        with self._connected():
            for start in range(0, len(operations), _MOST_OPERATIONS):
                some = list(operations[start : start + _MOST_OPERATIONS])
                answers += self._post("kv/txn", {"success": some})["responses"]
        return answers

    def _put(self, key: str, value: bytes) -> dict[str, object]:
        return {"key": self._name(key), "value": _text(value), "lease": self._lease}

    def _name(self, key: str) -> str:
        return _text(f"{self.prefix}/{key}".encode())

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        with self._lock:
            if not self._run:
                self._begin()
            yield

    def _post(self, what: str, data: Mapping[str, object]) -> Mapping[str, Any]:
        """Asks one member after the other until one answers. Needs the lock."""
        from etcd3gw import exceptions

        deadline = min(self.until, time.monotonic() + self._seconds)
        pause = _FIRST_PAUSE
        while True:
            try:
                return self._post_to(self._current, what, data)
            except exceptions.Etcd3Exception as error:
                said = str(error.detail_text or error)
                if "lease not found" in said:
                    raise EtcdLostError(
                        f"the keys of the job {self._place.job!r} are gone from etcd at "
                        f"{self._place}: no agent reached it for {LEASE_SECONDS} s"
                    ) from error
                if "permission denied" in said or "invalid user" in said:
                    raise EtcdLostError(f"etcd at {self._place} refuses: {said.strip()}") from error
                if "invalid auth token" in said:
                    self._tokens.pop(self._current, None)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise EtcdLostError(
                        f"no member of etcd at {self._place} answered within {self._seconds:g} s: "
                        f"{said.strip() or type(error).__name__}"
                    ) from error
                self._current = (self._current + 1) % len(self._clients)
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _post_to(self, member: int, what: str, data: Mapping[str, object]) -> Mapping[str, Any]:
        client = self._clients[member]
        headers = {}
        if self._place.user:
            if member not in self._tokens:
                password = Path(self._place.password_file).read_text().strip()
                asked = {"name": self._place.user, "password": password}
                granted = client.post(client.get_url("/auth/authenticate"), json=asked)
                self._tokens[member] = granted["token"]
            headers["Authorization"] = self._tokens[member]
        answer: Mapping[str, Any] = client.post(
            client.get_url(f"/{what}"), data=json.dumps(data), headers=headers
        )
        return answer


def _clients(place: EtcdPlace) -> list[Any]:
    try:
        import etcd3gw
    except ImportError as error:
        raise RuntimeError(
            f"a store in etcd needs pip install 'tensorwire[etcd]' ({error})"
        ) from None
    return [
        etcd3gw.client(
            host=_bracketed(host),
            port=port,
            protocol="https" if place.ca else "http",
            ca_cert=place.ca or None,
            cert_cert=place.cert or None,
            cert_key=place.cert_key or None,
            timeout=_SECONDS_OF_AN_ATTEMPT,
            api_path=_API,
        )
        for host, port in place.members
    ]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _value(answer: Mapping[str, Any]) -> bytes | None:
    entries = answer.get("kvs") or ()
    return base64.b64decode(entries[0].get("value", "")) if entries else None
