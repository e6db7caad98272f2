"""The lines that an agent says of changes which others made to the plan."""

from __future__ import annotations

from tensorwire.launch.chronicle import Chronicle, describe_starts
from tensorwire.launch.seats import Joined
from tests.tensorwire.launch.plans import Job, node


def test_an_agent_that_was_struck_out_says_so_once_and_once_that_it_is_back() -> None:
    job, chronicle = Job("ps:1,service", "trainer:1", nodes=2), Chronicle("node1")
    assert list(chronicle.lines(job.plan, ["trainer:1", "ps:1"])) == []
    job.leave(1)
    assert list(chronicle.lines(job.plan, ["trainer:1", "ps:1"])) == [
        "no sign of life of this agent reached the others, who have struck it out: ps:1, trainer:1 "
        "end here, as their seats may be others' by now, and it joins again"
    ]
    assert chronicle.is_returning
    assert list(chronicle.lines(job.plan, ["trainer:1"])) == []
    job.happens(Joined(node(1, job.roles), job.roles))
    assert list(chronicle.lines(job.plan, [])) == ["this agent is back in the job"]
    assert not chronicle.is_returning
    again = [seat for seat in job.plan.seats if seat.holder == "node1"]
    assert describe_starts(again) == "ps:1, trainer:1 start again, as lives 2, 2"
    assert describe_starts(again[:1]) == "ps:1 starts again, as life 2"


def test_an_agent_that_has_not_joined_yet_was_not_struck_out() -> None:
    job, chronicle = Job("trainer:1"), Chronicle("node1")
    assert list(chronicle.lines(job.plan, [])) == []
    job.join(1)
    assert list(chronicle.lines(job.plan, [])) == []
    assert describe_starts(job.plan.seats) == ""


def test_others_say_once_of_an_agent_that_it_was_taken_out_and_it_does_not() -> None:
    job = Job("trainer:1", nodes=2)
    chronicles = Chronicle("node0"), Chronicle("node1")
    for each in chronicles:
        assert list(each.lines(job.plan, [])) == []
    job.ends("trainer:1", 3)
    told = [list(each.lines(job.plan, [])) for each in chronicles]
    assert told == [
        [
            "agent node1 on  is taken out of the job, which goes on: trainer:1 failed with exit "
            "code 3 and has no restarts left there"
        ],
        [],
    ]
    assert list(chronicles[0].lines(job.plan, [])) == []
