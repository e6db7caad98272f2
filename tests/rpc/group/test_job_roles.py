"""The workers of a job that may still come."""

from __future__ import annotations

import pytest

from rpc.group.job_roles import JobRole, JobRoles

ROLES = JobRoles({"server": JobRole(1, 2), "trainer": JobRole(2, 8)})


def test_the_variable_says_how_many_there_were_and_can_be() -> None:
    assert ROLES.encode() == "server=1/2,trainer=2/8"
    assert JobRoles.of({"RPC_ROLES": ROLES.encode()}) == ROLES
    assert JobRoles.of({}) == JobRoles()


@pytest.mark.parametrize("text", ["server", "server=1", "server=a/b", "=,"])
def test_a_variable_of_another_form_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"RPC_ROLES='{text}' is not of the form NAME=STARTED"):
        JobRoles.of({"RPC_ROLES": text})


def test_who_may_still_come_is_waited_for() -> None:
    assert [ROLES.refusal(name, []) for name in ("server:1", "trainer:7")] == ["", ""]
    assert JobRoles().refusal("sever:0", []) == ""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("sever:0", "did you mean 'server:0'?"),
        ("trainer", "did you mean 'trainer:0'?"),
        ("trainer:x", "role 'trainer' has at most 8 workers, numbered from 0"),
        ("server:2", "role 'server' has at most 2 workers, numbered from 0"),
        ("databse", "did you mean 'database'?"),
        ("zzz:0", "its roles are server, trainer"),
    ],
)
def test_who_never_will_is_named_with_what_was_meant(name: str, told: str) -> None:
    refusal = ROLES.refusal(name, ["database", "server:0"])
    assert refusal.startswith(f"there is no worker {name!r} in this job")
    assert refusal.endswith(told)
