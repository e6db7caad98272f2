"""Plays whole clusters without I/O: servers, trainers, a coordinator, a store, a network.

A seed says what happens in which order: messages arrive in any order and some twice, servers and
trainers are killed or cut off, come back, join, finish; snapshots are taken, shards move. The
decisions are the real ones. The state is a list of what was applied to each of a few ids; at the
end, and at each cut, it is compared with what the trainers know that they sent. Beside it each
shard has a real table and real dense parameters, which must agree with the list.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from tests.tensorwire.parameter_server.game.cluster import Game
from tests.tensorwire.parameter_server.game.plans import Broken, Plan, draw_plan


def check_game(seed: int, plan_of: Callable[[int], Plan] = draw_plan) -> int:
    """Plays the game of a seed; raises if a rule is broken.

    Args:
        seed: the seed.
        plan_of: draws the plan of a seed.
    """
    if seed % 8 == 0:
        gc.collect()  # of tables of past games, each of which has a share of all addresses
    try:
        return Game(seed, plan_of(seed)).play()
    except Exception as error:
        raise Broken(f"seed {seed}: {type(error).__name__}: {error}") from error
