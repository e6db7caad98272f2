"""Workers with TLS trust those whose certificate is theirs, and nobody else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import trustme

from rpc.transports.tensorwire import Settings, TensorWireTransport
from rpc.transports.tensorwire.tls import TlsOptions
from rpc.worker_info import WorkerInfo
from tests import waiting
from tests.rpc.transports.conformance import Worker, introduce
from tests.rpc.transports.cutter import Cutter
from tests.rpc.transports.tensorwire.certificates import write

Maker = Callable[..., Worker]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Maker]:
    """Makes started workers, with TLS over TCP unless told otherwise; closes them."""
    made: list[Worker] = []

    def worker(name: str, rank: int, **changes: object) -> Worker:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        settings = Settings(local_paths=False, tls=write(folder, name), group_key=b"secret")
        settings = replace(settings, **changes)
        made.append(Worker(TensorWireTransport(settings), WorkerInfo(name, rank)))
        made[-1].start()
        return made[-1]

    yield worker
    for each in made:
        each.close(0.2)


def reason(worker: Worker) -> str:
    worker.until(lambda: bool(worker.lost))
    return worker.lost[0][1]


def test_workers_with_certificates_of_their_own_call_each_other(make: Maker) -> None:
    introduce([a := make("w0", 0), b := make("w1", 1)])
    tensor = torch.randn(500_000)
    assert a.call(b, b"there", b"", tensor).tensors[0].equal(tensor)
    assert b.call(a, b"back").header == b"back"


def test_one_with_anothers_certificate_is_not_called(make: Maker) -> None:
    a, liar = make("w0", 0), make("w7", 1)
    liar.info = WorkerInfo("w1", 1)
    introduce([a, liar])
    a.ask(liar, b"hello")
    assert "its certificate is for 'w7', not for worker 'w1'" in reason(a)
    assert liar.received == []


def test_one_with_anothers_certificate_may_not_call(make: Maker) -> None:
    a, liar = make("w0", 0), make("w7", 1)
    liar.info = WorkerInfo("w1", 1)
    introduce([a, liar])
    liar.ask(a, b"hello")
    assert "refused: its certificate is for 'w7', not for worker 'w1'" in reason(liar)
    assert a.received == []


def test_the_groups_key_is_needed_as_well(make: Maker) -> None:
    introduce([a := make("w0", 0), b := make("w1", 1, group_key=b"another")])
    a.ask(b, b"hello")
    assert "the acceptor does not hold the group's key" in reason(a)


def test_an_authority_of_ones_own_does_not_help(make: Maker, tmp_path: Path) -> None:
    own = trustme.CA()
    tls = write(tmp_path, "w1", by=own, ca=own)
    introduce([a := make("w0", 0), b := make("w1", 1, tls=tls)])
    a.ask(b, b"hello")
    assert "certificate verify failed" in reason(a)


@pytest.mark.parametrize("caller", [0, 1])
def test_one_without_tls_is_told_what_is_missing(make: Maker, caller: int) -> None:
    introduce(workers := [make("w0", 0), make("w1", 1, tls=None)])
    workers[caller].ask(workers[1 - caller], b"hello")
    sides = ("this worker uses TLS and worker w1 does not", "worker w0 uses TLS and this worker")
    assert sides[caller] in reason(workers[caller])


def test_workers_of_one_host_use_unix_sockets_as_before(make: Maker, tmp_path: Path) -> None:
    """Without TLS, as otherwise nobody would trust this certificate."""
    own = trustme.CA()
    tls = write(tmp_path, "w1", by=own, ca=own)
    introduce([a := make("w0", 0, local_paths=True), b := make("w1", 1, local_paths=True, tls=tls)])
    assert a.call(b, b"hello").header == b"hello"


def test_certificates_change_and_no_call_breaks(make: Maker, tmp_path: Path) -> None:
    """Both get certificates of another authority, which the former ones would not do for."""
    new = trustme.CA(key_type=trustme.KeyType.ECDSA)
    workers = []
    for rank, name in enumerate(("w0", "w1")):
        tls: TlsOptions = write(tmp_path, name)
        folder = tmp_path / f"{name}-tls"
        folder.mkdir()
        tls = replace(write(folder, name), rotate_every=1e-9)
        workers.append(make(name, rank, tls=tls))
    cutter = Cutter()
    introduce(workers)
    a, b = workers
    asked = [a.ask(b, b"%d" % number) for number in range(50)]
    for name in ("w0", "w1"):
        write(tmp_path / f"{name}-tls", name, by=new, ca=new)
    asked += [a.ask(b, b"%d" % number) for number in range(50, 100)]
    waiting.until(lambda: cutter.cut() > 0)
    asked += [a.ask(b, b"%d" % number) for number in range(100, 200)]
    assert [a.reply(each).header for each in asked] == [b"%d" % number for number in range(200)]
    assert len(b.received) == 200
    assert (a.lost, b.lost) == ([], [])
