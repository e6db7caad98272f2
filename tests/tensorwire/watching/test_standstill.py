"""Standstills are named right, and slow phases raise none. No processes, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tensorwire.watching.standstill import Finding, Standstill
from tensorwire.watching.views import ProcessView, WorkerView

LEAST = 5.0


def worker(
    name: str,
    steps: int,
    *,
    life: int = 1,
    waits_for: Iterable[str] = (),
    serving: Iterable[Mapping[str, Any]] = (),
    phase: str = "",
    stack: Iterable[str] = ("train (train.py:3)",),
    state: str = "S",
    cpu: float = 0.0,
    collecting: float = 0.0,
    silent_for: float = 0.0,
    threads: Iterable[Mapping[str, Any]] = (),
    role: str = "",
    sources: Mapping[str, Any] | None = None,
    age: float = 0.0,
    longest: float = 0.1,
) -> WorkerView:
    """A worker; ``age`` is that of its last step, as it told when it last answered."""
    progress = {"steps": steps, "age": age, "phase": phase, "phase_age": 0.0, "longest": longest}
    facts = {
        "progress": progress,
        "waiting": [{"to": to, "call": "push", "age": 9.0} for to in waits_for],
        "serving": list(serving),
        "collecting": collecting,
        "threads": [{"name": "MainThread", "stack": list(stack)}, *threads],
        "sources": sources or {},
    }
    process = ProcessView(1, state, cpu, 0, 1)
    role = role or name.partition(":")[0]
    return WorkerView(name, role, 0, life, "runs", 0, "", "", process, facts, silent_for)


def later(told: WorkerView, age: float) -> WorkerView:
    """The worker after so many seconds without a step, or silent since then."""
    if told.silent_for:
        return replace(told, silent_for=age)
    facts = dict(told.facts or {})
    facts["progress"] = {**facts["progress"], "age": age}
    return replace(told, facts=facts)


def play(*workers: WorkerView, seconds: float = 30.0, least: float = LEAST) -> list[Finding]:
    """Steps for a while, and then shows the workers as they are, every second."""
    watch = Standstill(least, at_once=True)
    for second in range(4):
        moving = [worker(each.name, second, life=each.life) for each in workers]
        assert watch.look(float(second), moving) == []
    found: list[Finding] = []
    for second in range(4, 4 + int(seconds)):
        found += watch.look(float(second), [later(each, second - 3.0) for each in workers])
    return found


def test_a_stopped_server_is_blamed_once_and_its_trainers_wait_for_it() -> None:
    (finding,) = play(
        worker("ps:0", 3, state="T", silent_for=1.0),
        worker("trainer:0", 3, waits_for=["ps:0"]),
        worker("trainer:1", 3, waits_for=["ps:0"]),
    )
    assert finding.blamed == ("ps:0",)
    assert finding.waiting == ("trainer:0", "trainer:1")
    assert "trainer:0 and trainer:1 wait for ps:0, which is stopped" in finding.sentence


def test_a_cycle_of_calls_is_named_as_one() -> None:
    (finding,) = play(
        worker("a:0", 3, waits_for=["b:0"]),
        worker("b:0", 3, waits_for=["c:0"]),
        worker("c:0", 3, waits_for=["a:0"]),
    )
    assert "a:0 waits for b:0 waits for c:0 waits for a:0: a cycle" in finding.sentence
    assert set(finding.blamed) == {"a:0", "b:0", "c:0"}


def test_a_data_loader_that_stands_is_named() -> None:
    stack = ["read (loader.py:1)", "__next__ (site-packages/torch/utils/data/dataloader.py:7)"]
    (finding,) = play(worker("trainer:0", 3, stack=stack))
    assert "trainer:0 waits for its data loader" in finding.sentence


def test_a_handler_that_sleeps_is_named_with_its_place() -> None:
    thread = {"name": "rpc-ps:0-3", "stack": ["nap (job.py:9)", "serve (rpc/calls/service.py:1)"]}
    serving = [{"from": "trainer:0", "call": "job.nap", "age": 7.0}]
    (finding,) = play(
        worker("trainer:0", 3, waits_for=["ps:0"]),
        worker("ps:0", 3, serving=serving, threads=[thread]),
    )
    assert "ps:0, which has been running job.nap for trainer:0 for 7 s" in finding.sentence
    assert "now in nap (job.py:9)" in finding.sentence


def test_a_held_lock_of_the_interpreter_is_told_from_a_stopped_process() -> None:
    (finding,) = play(worker("trainer:0", 3, silent_for=1.0))
    assert "has not answered for 6 s although its process runs" in finding.sentence


def test_a_long_collection_is_named_although_it_takes_processor_time() -> None:
    found: list[Finding] = []
    watch = Standstill(LEAST, at_once=True)
    for second in range(40):
        steps = min(second, 3)
        collecting = 20.0 if steps == 3 else 0.0
        told = worker("ps:0", steps, cpu=float(second), collecting=collecting)
        found += watch.look(float(second), [later(told, float(second - steps))])
    (finding,) = found
    assert "has been collecting garbage for 20 s" in finding.sentence


def test_a_trainer_whose_push_servers_wait_for_is_told_to_finish() -> None:
    (finding,) = play(
        worker("ps:0", 3, sources={"parameter server": {"waits_for": ["trainer:1"]}}),
        worker("trainer:0", 3, waits_for=["ps:0"]),
        worker("trainer:1", 3),
    )
    assert finding.sentence.endswith(
        "ps:0 and trainer:0 wait for trainer:1, which is in train (train.py:3), and has neither "
        "pushed nor called cluster.finish()"
    )


def test_a_rank_that_is_missing_from_a_collective_is_named() -> None:
    inside = ["all_reduce (torch/distributed/distributed_c10d.py:9)", "train (train.py:3)"]
    (finding,) = play(
        worker("trainer:0", 3, stack=inside),
        worker("trainer:1", 3, stack=["sleep (job.py:4)"]),
        worker("trainer:2", 3, stack=inside),
    )
    assert finding.blamed == ("trainer:1",)
    assert "trainer:0 and trainer:2 wait in all_reduce" in finding.sentence
    assert "missing from it: trainer:1 is in sleep (job.py:4)" in finding.sentence


def test_a_named_phase_compilation_and_computation_raise_nothing() -> None:
    assert play(worker("trainer:0", 3, phase="evaluation"), seconds=90) == []
    stack = ["compile (site-packages/torch/_inductor/compile_fx.py:7)"]
    assert play(worker("trainer:0", 3, stack=stack), seconds=90) == []
    watch = Standstill(LEAST, at_once=True)
    for second in range(90):
        steps = min(second, 3)
        computing = worker("trainer:0", steps, cpu=0.9 * second, age=float(second - steps))
        assert watch.look(float(second), [computing]) == []


def test_a_slow_first_step_raises_nothing() -> None:
    watch = Standstill(LEAST, at_once=True)
    for second in range(90):
        assert watch.look(float(second), [worker("trainer:0", 0, age=float(second))]) == []


def test_the_budget_is_learned_from_the_longest_pause_before() -> None:
    watch = Standstill(LEAST, at_once=True)
    watch.look(4.0, [worker("trainer:0", 2, longest=4.0)])
    assert watch.budget("trainer:0") == 40.0
    assert watch.look(44.0, [worker("trainer:0", 2, longest=4.0, age=40.0)]) == []
    assert len(watch.look(45.0, [worker("trainer:0", 2, longest=4.0, age=41.0)])) == 1


def test_looks_that_are_far_apart_make_no_budget_longer() -> None:
    watch = Standstill(LEAST, at_once=True)
    watch.look(0.0, [worker("trainer:0", 1)])
    watch.look(12.0, [worker("trainer:0", 1200, age=2.0)])
    assert watch.budget("trainer:0") == LEAST
    assert watch.soonest(12.0) == 10.0 + LEAST
    assert watch.soonest(16.0) == math.inf
    assert len(watch.look(15.5, [worker("trainer:0", 1200, age=5.5)])) == 1


def test_nobody_is_blamed_while_a_slow_phase_or_its_work_explains_it() -> None:
    """One trainer evaluates, and so the others wait for it at the server."""
    waits = {"parameter server": {"waits_for": ["trainer:1"]}}
    others = worker("ps:0", 3, sources=waits), worker("trainer:0", 3, waits_for=["ps:0"])
    assert play(*others, worker("trainer:1", 3, phase="evaluation"), seconds=90) == []
    watch = Standstill(LEAST, at_once=True)
    for second in range(90):
        age = max(0.0, second - 3.0)
        evaluates = worker("trainer:1", 3, cpu=0.9 * second, age=age)
        assert watch.look(float(second), [*(later(o, age) for o in others), evaluates]) == []


def test_a_worker_that_went_silent_in_a_phase_is_named_when_its_budget_ends() -> None:
    watch = Standstill(LEAST, at_once=True)
    for second in range(30):
        silent = max(0.0, second - 10.0)
        told = worker("a:0", 3, phase="evaluation", state="T", silent_for=silent)
        found = watch.look(float(second), [told])
        assert bool(found) == (second == 16)  # the first look after ten seconds and the budget
        assert all("a:0 is stopped" in each.sentence for each in found)


def test_without_a_minute_of_history_nothing_is_told_unless_a_timeout_was_named() -> None:
    watch = Standstill(LEAST)
    for second in range(60):
        age = max(0.0, second - 3.0)
        assert watch.look(float(second), [worker("trainer:0", min(second, 3), age=age)]) == []
    assert len(watch.look(61.0, [worker("trainer:0", 3, age=58.0)])) == 1


def test_a_new_life_begins_without_a_past() -> None:
    watch = Standstill(LEAST, at_once=True)
    for second in range(4):
        watch.look(float(second), [worker("trainer:0", second)])
    for second in range(4, 60):
        told = worker("trainer:0", 0, life=2, age=float(second))
        assert watch.look(float(second), [told]) == []


def test_a_standstill_that_ended_and_came_again_is_told_again() -> None:
    watch = Standstill(LEAST, at_once=True)
    for second in range(4):
        watch.look(float(second), [worker("a:0", second)])
    assert len(watch.look(20.0, [worker("a:0", 3, age=17.0)])) == 1
    assert watch.look(21.0, [worker("a:0", 3, age=18.0)]) == []
    assert watch.look(22.0, [worker("a:0", 4)]) == []
    assert len(watch.look(400.0, [worker("a:0", 4, age=378.0)])) == 1


def test_a_standstill_is_told_once_more_when_others_are_seen_to_wait_for_it() -> None:
    inside = ["all_reduce (torch/distributed/distributed_c10d.py:9)", "train (train.py:3)"]
    watch = Standstill(LEAST, at_once=True)
    found: list[Finding] = []
    for second in range(60):
        stack = inside if second > 3 else ["train (train.py:3)"]
        first, other = min(second, 4), min(second, 2)
        told = worker("trainer:0", first, stack=stack, age=float(second - first))
        found += watch.look(
            float(second), [told, worker("trainer:1", other, age=float(second - other))]
        )
    assert [each.waiting for each in found] == [(), ("trainer:0",)]
    assert "missing from it: trainer:1" in found[1].sentence


def test_two_standstills_that_have_nothing_to_do_with_each_other_are_two_findings() -> None:
    findings = play(
        worker("ps:0", 3, state="T"),
        worker("trainer:0", 3, waits_for=["ps:0"]),
        worker("trainer:1", 3, stack=["read (torch/utils/data/loader.py:1)"]),
    )
    assert sorted(each.blamed for each in findings) == [("ps:0",), ("trainer:1",)]
    assert {each.blamed: each.waiting for each in findings}[("ps:0",)] == ("trainer:0",)
