"""Many games ask one policy for actions; the answers are computed together.

Each observer plays several games at once, every one a coroutine that awaits its next
action. The agent can answer in two ways:

* ``choose``: one state, one pass through the policy, one answer;
* ``choose_in_batch``: note the state and return a *future* at once. When every game has
  asked, or no more can come, one pass through the policy completes all the futures.
  ``rpc.functions.async_execution`` makes that possible: the reply is sent when the future
  completes, and no thread waits for it.

A pass for sixteen states costs little more than one for a single state: the weights are
read from memory once. The policy here was taught to balance the pole by a rule, so that the
returns show that both ways play the same game.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import rpc
from tutorials import taking_part
from tutorials.batching import report

_ENVIRONMENT = "CartPole-v1"
_WAYS = ("choose", "choose_in_batch")


class Agent:
    """Owns the policy and answers for all games.

    Args:
        width: of the policy's hidden layers.
        games: how many ask; a batch is full when each has.
    """

    def __init__(self, width: int, games: int) -> None:
        self._policy = nn.Sequential(
            nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )
        self._games = games
        self._lock = threading.Lock()
        self._waiting: list[tuple[Tensor, torch.futures.Future[int]]] = []

    def learn_the_rule(self, steps: int) -> float:
        """Teach the policy to push towards where the pole falls; return the last loss."""
        optimizer = torch.optim.Adam(self._policy.parameters(), lr=1e-3)
        weights = torch.tensor([0.1, 0.4, 1.0, 1.0])
        for _ in range(steps):
            states = torch.randn(64, 4) * torch.tensor([1.0, 1.0, 0.1, 1.0])
            loss = cross_entropy(self._policy(states), (states @ weights > 0).long())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return loss.item()

    def choose(self, state: Tensor) -> int:
        """Answer one game."""
        with torch.no_grad():
            return int(self._policy(state).argmax())

    @rpc.functions.async_execution
    def choose_in_batch(self, state: Tensor) -> torch.futures.Future[int]:
        """Answer one game together with all others, once they have asked, too."""
        answer: torch.futures.Future[int] = torch.futures.Future()
        with self._lock:
            self._waiting.append((state, answer))
            full = len(self._waiting) == self._games
            batch = self._waiting if full else []
            if full:
                self._waiting = []
        if batch:
            self._answer(batch)
        return answer

    def _answer(self, batch: Sequence[tuple[Tensor, torch.futures.Future[int]]]) -> None:
        with torch.no_grad():
            actions = self._policy(torch.stack([state for state, _ in batch])).argmax(dim=1)
        for (_, answer), action in zip(batch, actions.tolist(), strict=True):
            answer.set_result(action)


class Observer:
    """Plays several games at once. Lives on its own worker."""

    def __init__(self, agent: rpc.RRef[Agent], games: int, seed: int) -> None:
        self._agent: Any = agent
        self._games: list[Any] = [gymnasium.make(_ENVIRONMENT) for _ in range(games)]
        self._states = [game.reset(seed=seed + n)[0] for n, game in enumerate(self._games)]
        self._lengths = [0] * games

    async def play(self, steps: int, way: str) -> list[int]:
        """Play every game that many steps; return the lengths of those that ended."""
        numbers = range(len(self._games))
        ended = await asyncio.gather(*(self._play_one(n, steps, way) for n in numbers))
        return [length for lengths in ended for length in lengths]

    async def _play_one(self, number: int, steps: int, way: str) -> list[int]:
        game, ended = self._games[number], []
        for _ in range(steps):
            state = torch.from_numpy(self._states[number])
            action = await getattr(self._agent.rpc_async(), way)(state)
            self._states[number], _, lost, timed_out, _ = game.step(action)
            self._lengths[number] += 1
            if lost or timed_out:
                ended.append(self._lengths[number])
                self._lengths[number] = 0
                self._states[number], _ = game.reset()
        return ended


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Play both ways in turn and compare; runs on the agent."""
    agent = Agent(options.width, options.games * (len(workers) - 1))
    print(f"policy taught: loss {agent.learn_the_rule(options.lessons):.3f}", flush=True)
    reference = rpc.RRef(agent)
    observers: list[Any] = [
        rpc.remote(worker, Observer, (reference, options.games, 100 * rank + options.seed))
        for rank, worker in enumerate(workers[1:])
    ]
    print(f"{len(observers)} observers with {options.games} games each, backend "
          f"{options.backend}", flush=True)  # fmt: skip
    rates: dict[str, list[float]] = {way: [] for way in _WAYS}
    lengths: dict[str, list[int]] = {way: [] for way in _WAYS}
    for _ in tqdm(range(options.rounds), unit=" rounds", disable=None):
        for way in _WAYS:
            started = time.perf_counter()
            shares = [each.rpc_async(timeout=0).play(options.steps, way) for each in observers]
            lengths[way] += [one for each in torch.futures.wait_all(shares) for one in each]
            decisions = options.steps * options.games * len(observers)
            rates[way].append(decisions / (time.perf_counter() - started))
    for way in _WAYS:
        games = len(lengths[way])
        over = f", {games} games of {_mean(lengths[way]):.0f} steps" if games else ""
        print(f"{way}: {statistics.median(rates[way]):.0f} decisions a second{over}")
    report.show_ratio(rates, "decisions a second", options.output / "inference.png")


def _mean(values: Sequence[int]) -> float:
    return statistics.fmean(values) if values else 0.0


def main() -> int:
    """Read the command line and run."""
    parser = taking_part.parser(__doc__, "agent:1 observer:2,service", output="batching")
    add = parser.add_argument
    add("--games", type=taking_part.positive, default=8, help="per observer (%(default)s)")
    add("--steps", type=taking_part.positive, default=100, help="of a game a round (%(default)s)")
    add("--rounds", type=taking_part.positive, default=5, help="of measuring (%(default)s)")
    add("--width", type=taking_part.positive, default=2048, help="of the policy (%(default)s)")
    add("--lessons", type=taking_part.positive, default=100, help="steps of teaching (%(default)s)")
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=2))


if __name__ == "__main__":
    sys.exit(main())
