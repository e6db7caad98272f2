"""Jobs whose store lies in etcd: the first machine of one dies, and its leader, and it goes on."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.etcd import ETCD, EtcdCluster, etcd_cluster
from tests.tensorwire.launch.jobs import FORKED, PROGRAMS, SECONDS, Job, job
from tests.waiting import until

pytest.importorskip("etcd3gw", reason="needs tensorwire[etcd]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
    pytest.mark.timeout(300),
    pytest.mark.skipif(ETCD is None, reason="needs etcd (Debian's etcd-server)"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    (tmp_path / "etcd").mkdir()
    with etcd_cluster(tmp_path / "etcd") as made:
        yield made


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


def _progress(work: Job, name: str) -> dict[str, Any]:
    path = work.folder / f"{name}.progress"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"steps": 0}
    return found


def _works_on(work: Job, name: str) -> None:
    before = _progress(work, name)["steps"]
    until(lambda: _progress(work, name)["steps"] >= before + 3, SECONDS * 2, 0.1)


def _keys(cluster: EtcdCluster, members: range = range(3)) -> int:
    """The number of keys of all jobs."""
    for member in members:
        address = f"http://{cluster.endpoint.split(',')[member]}/v3/kv/range"
        question = {"key": "Lw==", "range_end": "MA==", "count_only": True}
        try:
            with urllib.request.urlopen(address, json.dumps(question).encode(), 10) as answer:
                return int(json.loads(answer.read()).get("count", 0))
        except OSError:
            continue
    raise AssertionError("no member answers")


def test_the_first_machine_and_a_member_of_etcd_die_and_the_job_goes_on(
    work: Job, cluster: EtcdCluster, tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    meets = ("--rdzv-backend", "tensorwire-etcd", "--rdzv-endpoint", cluster.endpoint)
    flags = (*meets, "--rdzv-id", "j", "--nnodes", "1:2", "--group-key-file", str(key))
    roles = ("--role", "ps:2/job,service,max_restarts=3", "--role", "trainer:1,max_restarts=3")
    member = (str(PROGRAMS / "member.py"), str(work.folder))
    first = work.start(*flags, *roles, "--spare", "2", *FORKED, *member)
    _works_on(work, "trainer:0")
    second = work.start(*flags, *roles, "--spare", "2", *FORKED, *member)
    _works_on(work, "trainer:1")

    cluster.kill(0)
    _works_on(work, "trainer:0")
    _works_on(work, "trainer:1")

    first.send(signal.SIGKILL)
    until(lambda: "gives no sign of life" in second.said, SECONDS, 0.1)
    _works_on(work, "trainer:1")
    work.end()
    assert second.wait(SECONDS * 2) == 0, work.said
    until(lambda: _keys(cluster, range(1, 3)) == 0, 120, 0.5)


def test_a_cluster_that_does_not_answer_ends_with_one_sentence(work: Job) -> None:
    meets = ("--rdzv-backend", "tensorwire-etcd", "--rdzv-endpoint", "127.0.0.1:9")
    conf = ("--rdzv-conf", "read_timeout=1", "--rdzv-id", "j", "--role", "worker:1")
    agent = work.start(*meets, *conf, *FORKED, str(PROGRAMS / "light.py"), str(work.folder))
    assert agent.wait() == 1
    assert "no member of etcd at 127.0.0.1:9 answered within 1 s" in agent.said
    assert "Traceback" not in agent.said
