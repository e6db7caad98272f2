"""The dry run of a job, which starts nothing."""

from __future__ import annotations

import shlex

import pytest

from tensorwire.launch.main import run


def test_a_dry_run_lists_the_workers_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "python")
    line = (
        "--dry-run --nnodes 1:2 --rdzv-endpoint head:1 --rdzv-id j --max-restarts 2 --spare 1 "
        "--role ps:1,service=my.server --role ddp:2,pg,max_restarts=0 -m train --lr '0 1'"
    )
    assert run(shlex.split(line)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rendezvous: tensorwire at head:1, job 'j', 1:2 nodes",
        "ps:0 (id 0; restart=worker, max_restarts=2, service): python -u -m my.server",
        "ddp:0 (id 1; restart=role, max_restarts=0, pg): python -u -m train --lr '0 1'",
        "ddp:1 (id 2; restart=role, max_restarts=0, pg): python -u -m train --lr '0 1'",
        "room for 1 workers of an agent that dies",
    ]


def test_a_dry_run_without_roles_says_what_torchrun_would_start(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "python")
    assert run(shlex.split("--dry-run --nproc-per-node 3 --no-python ./run a")) == 0
    assert capsys.readouterr().out.splitlines()[1] == "3 workers of role 'default': ./run a"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("--role cpu:1 t.py", "role 'cpu'"),
        (
            "--role a:1 --rdzv-backend etcd t.py",
            "tensorwire, which is the default, and tensorwire-etcd",
        ),
        ("--role a:1 --nnodes x t.py", "invalid literal"),
        ("--role a:1 --nnodes 2 --rdzv-endpoint head:1 t.py", "has no key"),
    ],
)
def test_a_mistake_costs_one_line(
    line: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shlex.split(line)) == 2
    assert problem in capsys.readouterr().err
