"""Roles as they are written on the command line."""

from __future__ import annotations

import pytest

from tensorwire.launch.roles import (
    Restart,
    Role,
    RoleError,
    Share,
    check_roles,
    has_count,
    parse_role,
)


@pytest.mark.parametrize(
    ("text", "role"),
    [
        ("trainer:4", Role("trainer", 4)),
        ("ps:2,service", Role("ps", 2, service=True)),
        ("ps:2,service=my.server", Role("ps", 2, service=True, module="my.server")),
        ("trainer:4,max_restarts=3", Role("trainer", 4, max_restarts=3)),
        ("trainer:4,max_restarts=0", Role("trainer", 4, max_restarts=0)),
        ("trainer:4,restart=worker", Role("trainer", 4)),
        ("trainer:4,restart=role", Role("trainer", 4, restart=Restart.ROLE)),
        ("trainer:4,restart=job", Role("trainer", 4, restart=Restart.JOB)),
        ("ddp:4,pg", Role("ddp", 4, restart=Restart.ROLE, process_group=True)),
        ("ddp:4,pg,restart=job", Role("ddp", 4, restart=Restart.JOB, process_group=True)),
        ("ps:3/job,service", Role("ps", 3, Share.JOB, service=True)),
        (
            "a-b_1:10,service=m,max_restarts=2,restart=role",
            Role("a-b_1", 10, Share.AGENT, True, "m", (), 2, Restart.ROLE),
        ),
    ],
)
def test_a_role_says_who_its_workers_are(text: str, role: Role) -> None:
    assert parse_role(text) == role
    assert has_count(text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("trainer", "not of the form NAME:COUNT"),
        ("trainer:", "not of the form"),
        ("trainer:four", "not of the form"),
        ("trainer:-1", "not of the form"),
        ("trainer:4/agents", "not of the form"),
        ("trainer:0", "COUNT=0 must be 1 or more"),
        ("two words:4", "a name is made of letters"),
        (":4", "a name is made of letters"),
        ("rank:4", "would take 'rank:0' for a rank or a device"),
        ("cpu:4", "would take 'cpu:0' for a rank or a device"),
        ("cuda:4", "would take 'cuda:0' for"),
        ("meta:1", "would take 'meta:0' for"),
        ("7:4", "would take '7:0' for"),
        ("trainer:4,servise", "there is no option 'servise'"),
        ("trainer:4,", "there is no option ''"),
        ("trainer:4,service=", "names no module"),
        ("trainer:4,max_restarts=many", "max_restarts=many must be a whole number"),
        ("trainer:4,max_restarts", "max_restarts= must be a whole number"),
        ("trainer:4,restart=never", "restart=never must be one of worker, role, job"),
        ("trainer:4,pg=1", "pg=1 takes no value"),
        ("trainer:4,pg,restart=worker", "pg needs restart=role"),
    ],
)
def test_what_is_wrong_with_a_role_is_said(text: str, problem: str) -> None:
    with pytest.raises(RoleError) as raised:
        parse_role(text)
    assert problem in str(raised.value)
    assert repr(text.partition(":")[0]) in str(raised.value) or repr(text) in str(raised.value)


def test_a_job_has_roles_with_names_of_their_own() -> None:
    roles = (Role("ps", 1), Role("trainer", 2))
    assert check_roles(roles) == roles
    with pytest.raises(RoleError, match="role 'ps' is given twice"):
        check_roles([*roles, Role("ps", 3)])
    with pytest.raises(RoleError, match="at least one role"):
        check_roles([])


def test_the_roles_that_start_anew_with_everyone_are_told_from_the_others() -> None:
    tied = [parse_role(f"a:1{options}").is_tied for options in ("", ",restart=role", ",pg")]
    assert tied == [False, False, True]
    assert parse_role("a:1,restart=job").is_tied
