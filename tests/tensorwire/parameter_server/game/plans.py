"""Draws from its seed the things that may happen in a game."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from tensorwire.parameter_server.decisions.consistency import (
    BSP,
    SSP,
    Async,
    Consistency,
)
from tensorwire.parameter_server.decisions.slots import SLOTS

IDS = tuple(range(0, SLOTS, SLOTS // 7))
"""Some ids; an id is its own slot."""

History = tuple[tuple[tuple[int, int], ...], ...]
"""By update: the pushes in it, each a trainer's number and its own."""


class Broken(AssertionError):
    """A rule does not hold."""


@dataclass(frozen=True)
class Plan:
    """The things that may happen in a game."""

    consistency: Consistency
    servers: int
    spare: int
    backups: int
    trainers: int
    steps: int
    kills: int
    trainer_kills: int
    snapshots: int
    resizes: int
    duplicates: bool
    zombies: bool
    newcomers: bool
    """Servers came back just before, of which not all have heard."""
    snapshot_follows: bool
    """A snapshot is asked for right behind each resize, while rows are on their way."""
    slow_rows: bool
    """Rows that move are long under way, as they are more bytes than anything else."""
    slow_pushes: bool
    """Pushes are, too: some arrive when their shard is no more."""
    naps: int
    """Members that stop for a while and wake with all their messages, timers and calls."""
    publishes: bool
    """Versions are published beside whatever else happens."""
    clocks_stand: bool
    """The clocks of those stand meanwhile, as those of a machine that is paused."""
    stranger: bool = False
    """Newcomers are shown views that were put back, or none, as a store may be somebody else's."""
    sleepers: bool = False
    """Heads stop until they are replaced, and read what was sent to them before they hear of it."""
    late_news: bool = False
    """Some hear that such a head was lost long after others."""
    slow_records: bool = False
    """Records are long on their way to backups."""
    reads_store: bool = False
    """Servers read each view in the store, often before the coordinator hears that it is there."""
    batches: int = 0
    """The batches of a sampler that trainers train, instead of a number of steps."""
    files: bool = False
    """These are files, of which each push trains parts."""
    slow_words: bool = False
    """Shards hear late from each other which pushes they have."""
    hosts: bool = False
    """A server that is killed takes a trainer with it, as on a host that both of them share."""
    looks: bool = False
    """Somebody asks time and again which samples are trained, as who shows the progress does; and
    trainers do, as they leave their loop and begin it again."""
    comings: int = 0
    """Trainers that leave before all is trained, or come while others train."""


def draw_plan(seed: int) -> Plan:
    """The plan of a seed."""
    r = random.Random(seed)
    servers = r.randint(1, 3)
    backups = r.choice([0, 1, 1, 1, 2])
    return Plan(
        consistency=r.choice([BSP(), BSP(), SSP(0), SSP(2), Async()]),
        servers=servers,
        spare=r.randint(0, 2),
        backups=backups,
        trainers=r.randint(1, 3),
        steps=r.randint(2, 7),
        kills=r.choice([0, 0, 1, 1, 2, 3]),
        trainer_kills=r.choice([0, 0, 0, 1]),
        snapshots=r.choice([0, 1, 2]),
        resizes=r.choice([0, 0, 1, 2]),
        duplicates=r.random() < 0.5,
        zombies=r.random() < 0.3,
        newcomers=r.random() < 0.4,
        snapshot_follows=r.random() < 0.5,
        slow_rows=r.random() < 0.5,
        slow_pushes=r.random() < 0.2,
        naps=r.choice([0, 1, 2, 4]),
        publishes=r.random() < 0.7,
        clocks_stand=r.random() < 0.5,
        stranger=random.Random(f"stranger {seed}").random() < 0.4,
    )


def calm(plan: Plan) -> Plan:
    """The plan without whatever goes wrong; for tests that add what one mistake needs."""
    return replace(
        plan, kills=0, trainer_kills=0, snapshots=0, resizes=0, naps=0,
        zombies=False, newcomers=False, stranger=False, publishes=False,
    )  # fmt: skip


def draw_plan_with_sleepers(seed: int) -> Plan:
    """The plan of a seed in which heads sleep until others have taken their places."""
    r = random.Random(f"sleepers {seed}")
    return replace(
        draw_plan(seed),
        consistency=r.choice([BSP(), SSP(2), Async(), Async()]),
        servers=r.randint(2, 3),
        backups=r.choice([1, 1, 2]),
        steps=r.randint(6, 14),
        kills=r.randint(1, 4),
        naps=r.randint(2, 8),
        resizes=0,
        zombies=False,
        clocks_stand=False,
        slow_pushes=False,
        sleepers=True,
        late_news=r.random() < 0.5,
        slow_records=r.random() < 0.3,
    )


def draw_plan_with_samples(seed: int) -> Plan:
    """The plan of a seed in which the samples are counted, under BSP."""
    r = random.Random(f"samples {seed}")
    plan = replace(draw_plan(seed), consistency=BSP(), batches=r.randint(1, 24))
    return replace(plan, trainers=r.randint(1, 3), trainer_kills=r.choice([0, 1, 2]))


def draw_plan_with_leases(seed: int) -> Plan:
    """The plan of a seed in which the samples are counted, under SSP or async."""
    r = random.Random(f"leases {seed}")
    consistency = r.choice([SSP(0), SSP(2), Async(), Async()])
    return replace(draw_plan_with_samples(seed), consistency=consistency)


def draw_plan_with_files(seed: int) -> Plan:
    """The plan of a seed in which the records of files are counted."""
    draw = draw_plan_with_leases if seed % 2 else draw_plan_with_samples
    plan = draw(seed)
    return replace(plan, files=True, batches=1 + plan.batches // 2)


def draw_plan_with_comings(seed: int) -> Plan:
    """The plan of a seed in which trainers leave, join again and come while samples are counted."""
    draws = draw_plan_with_samples, draw_plan_with_files, draw_plan_with_leases
    plan = draws[seed % 3](seed)
    return replace(plan, comings=random.Random(f"comings {seed}").randint(1, 5))


def draw_plan_with_moving_files(seed: int) -> Plan:
    """The plan of a seed in which servers come, go and die while files are read."""
    r = random.Random(f"moving files {seed}")
    plan = replace(draw_plan_with_comings(seed), files=True, batches=r.randint(4, 12))
    plan = replace(plan, servers=r.randint(2, 3), spare=r.randint(1, 2), resizes=r.randint(1, 4))
    backups, kills = r.choice([0, 1, 1]), r.randint(1, 3)
    return replace(plan, backups=backups, kills=kills, trainer_kills=r.randint(0, 2))


_LEAST = {"servers": 1, "trainers": 1, "steps": 1}
_KEPT = ("consistency", "sleepers", "batches", "files")
"""Without these it would be a game of another kind."""


def simpler_plans(plan: Plan) -> Iterator[Plan]:
    """The plans in which one thing less may go wrong, or as much but less often."""
    for each in fields(plan):
        value, least = getattr(plan, each.name), _LEAST.get(each.name, 0)
        if each.name not in _KEPT and value > least:
            for less in {type(value)(least), type(value)(value - 1)}:
                yield replace(plan, **{each.name: less})
