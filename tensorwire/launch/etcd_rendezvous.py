"""The rendezvous backend ``tensorwire-etcd``: the store of a job lies on none of its machines.

Agents and workers meet under the job's id in an etcd cluster, so any machine of the job may die,
also the first. The job's keys belong to a lease that each agent keeps alive; the last agent that
leaves deletes them, and a minute after the last one was killed they are gone, too.

Options (``--rdzv-conf``) beyond those of ``tensorwire``: ``ca``, ``cert`` and ``cert_key`` name
files for TLS, ``user`` and ``password_file`` a user of etcd's.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Final

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters

from rpc.errors import RpcError
from rpc.extend import (
    LEASE_SECONDS,
    EtcdPlace,
    EtcdStoreClient,
    address_on_the_way_to,
    host_store,
    members_of,
)
from tensorwire.launch.rendezvous import LOOPBACK, TensorWireRendezvous

_logger = logging.getLogger("rpcrun")

ETCD_BACKEND: Final = "tensorwire-etcd"
_SECONDS_BETWEEN_LOOKS: Final = 0.1
_OPTIONS: Final = ("ca", "cert", "cert_key", "user", "password_file")


def create_etcd_handler(params: RendezvousParameters) -> EtcdRendezvous:
    """Makes the handler for what torchrun's parser read."""
    return EtcdRendezvous(params)


def etcd_entry_point() -> object:
    """Answers torch's registry: returns the function that makes handlers."""
    return create_etcd_handler


class EtcdRendezvous(TensorWireRendezvous):
    """One agent's place in the rendezvous of a job in etcd.

    Args:
        params: as torchrun's parser makes them.

    Raises:
        RendezvousConnectionError: no member of the cluster answers.
        ValueError: the endpoint names none, or an option is missing that another needs.
    """

    def __init__(self, params: RendezvousParameters) -> None:
        self._keeper: _LeaseKeeper | None = None
        super().__init__(params)
        if not self.group_key:
            _logger.warning(
                "the job's values in etcd at %s are not signed: whoever writes there can end this "
                "job, or have agents and workers of his own take part in it; give all agents "
                "--rdzv-conf key_file=key, or rpcrun --group-key-file key",
                self._place,
            )
        self._keeper = _LeaseKeeper(self._connect())

    def _read_endpoint(self, params: RendezvousParameters) -> None:
        members = members_of(params.endpoint, f"--rdzv-endpoint={params.endpoint}")
        said = {name: params.get(name) or "" for name in _OPTIONS}
        for name, needs in (("user", "password_file"), ("cert", "cert_key"), ("cert", "ca")):
            if said[name] and not said[needs]:
                raise ValueError(f"--rdzv-conf {name}={said[name]} needs {needs}=FILE as well")
        self._place = EtcdPlace(members, params.run_id, **said)
        self._endpoint = str(self._place)
        self._host, self._port = members[0]

    def _open(self) -> EtcdStoreClient:
        return self._connect()

    def _connect(self, seconds: float = 0.0) -> EtcdStoreClient:
        client = EtcdStoreClient(self._place, seconds or self._read_seconds)
        try:
            client.connect()
        except OSError as error:
            raise RendezvousConnectionError(
                f"etcd at {self._place}, which --rdzv-endpoint names, cannot be used: {error}"
            ) from error
        return client

    @property
    def group_url(self) -> str:
        """The URL at which the workers' group meets."""
        return self._place.url()

    def get_backend(self) -> str:
        """The name of this backend."""
        return ETCD_BACKEND

    def _torchs_place(self) -> tuple[str, int]:
        """Hosts a store of torch's at the first agent that asks; nothing of the job lies in it."""
        place = self._values.get("torchs")
        if place is None:
            mine = address_on_the_way_to(self._host, self._port) or LOOPBACK
            self._torchs = host_store(mine, 0)
            told = f"{mine} {self._torchs.port}".encode()
            place = self._values.compare_and_set("torchs", None, told) or told
        host, _, port = place.decode().rpartition(" ")
        return host, int(port)

    def _where(self) -> str:
        return f"etcd at {self._place}"

    def shutdown(self) -> bool:
        """Leaves the rendezvous; the last agent deletes the job's keys."""
        left = super().shutdown()
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper = None
            with contextlib.suppress(RpcError, ConnectionError):  # the last one deletes all keys
                if self.is_last is not False and not self._others_live():
                    self._connect().delete_job()
        return left

    def _others_live(self) -> bool:
        """False if every other agent has left, or gives no sign of life for two that are due."""
        here = self._here()
        before = self.beats(here)
        deadline = time.monotonic() + 2 * self.beat_seconds
        while here and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_LOOKS)
            here = self._here()
        return any(count != before.get(node) for node, count in self.beats(here).items())


class _LeaseKeeper:
    """Keeps the job's keys alive, on a thread and a connection of its own."""

    def __init__(self, store: EtcdStoreClient) -> None:
        self._store = store
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rpcrun-lease", daemon=True)
        self._store.keep_alive()
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(LEASE_SECONDS / 6):
            try:
                self._store.keep_alive()
            except OSError as error:
                _logger.warning("the job's lease in etcd was not renewed: %s", error)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(LEASE_SECONDS)
