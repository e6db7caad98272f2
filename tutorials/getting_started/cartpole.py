"""One agent learns to balance a pole from many observers that play for it.

Each observer owns a CartPole environment of gymnasium and a copy of the policy. The
agent improves the policy and publishes its weights, which the observers follow:

    agent                                     observer
    learn, publish.update ── files ─────────▶ follow.load_into(its policy)
    play ── rpc_async ──────────────────────▶ policy(state), env.step, again and again
    games ◀──────────────────────────────────

An observer keeps what happened in its games and returns it when its share of a round
is played; the agent then improves the policy (by proximal policy optimization, PPO),
publishes it as the next version, and starts the next round. It ends when the mean
return of 100 games in a row reaches the environment's own threshold for "solved",
475 of at most 500 steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import torch
from torch import Tensor, nn
from tqdm import tqdm

import rpc
from tensorwire import checkpoint
from tutorials import pictures, taking_part

_ENVIRONMENT = "CartPole-v1"
_DISCOUNT = 0.99
_TRACE_DECAY = 0.95  # of generalized advantage estimation
_CLIP = 0.2
_GAMES_TO_JUDGE = 100
_SECONDS_TO_FOLLOW = 60.0


@dataclass(frozen=True, slots=True)
class Games:
    """Steps of games, one after another.

    Args:
        states: shape ``(steps, 4)``.
        actions: 0 or 1, shape ``(steps,)``.
        ends: whether a game was lost at that step, shape ``(steps,)``.
        cuts: whether a game ended there for any reason, shape ``(steps,)``.
        returns: sum of rewards of each finished game.
    """

    states: Tensor
    actions: Tensor
    ends: Tensor
    cuts: Tensor
    returns: list[float]


class Observer:
    """Plays games. Lives on its own worker, made there by the agent's call."""

    def __init__(self, weights: str, seed: int) -> None:
        self._weights = checkpoint.follow(weights, interval=0.01)
        self._policy = _network(outputs=2)
        self._dice = torch.Generator().manual_seed(seed)
        self._environment: Any = gymnasium.make(_ENVIRONMENT)
        self._state, _ = self._environment.reset(seed=seed)
        self._return = 0.0

    def play(self, version: int, steps: int) -> Games:
        """Play that many steps, going on with the game where the last call left it.

        Args:
            version: of the policy that is played, which was published before this call.
            steps: how many.
        """
        self._weights.wait_for(version=version, timeout=_SECONDS_TO_FOLLOW)
        self._weights.load_into(self._policy)
        states, actions, ends, cuts = [], [], [], []
        returns = []
        for _ in range(steps):
            state = torch.from_numpy(self._state)
            action = self._choose(state)
            self._state, reward, lost, timed_out, _ = self._environment.step(action)
            self._return += float(reward)
            states.append(state)
            actions.append(action)
            ends.append(lost)
            cuts.append(lost or timed_out)
            if lost or timed_out:
                returns.append(self._return)
                self._return = 0.0
                self._state, _ = self._environment.reset()
        cuts[-1] = True  # the round ends here, the game goes on
        return Games(
            torch.stack(states), torch.tensor(actions), torch.tensor(ends), torch.tensor(cuts),
            returns,
        )  # fmt: skip

    def _choose(self, state: Tensor) -> int:
        with torch.no_grad():
            chance_of_right = self._policy(state).softmax(dim=0)[1]
        return int(torch.rand((), generator=self._dice) < chance_of_right)

    def close(self) -> None:
        """Follow the weights no more."""
        self._weights.close()


class Agent:
    """Owns the policy and learns from the observers' games."""

    def __init__(self) -> None:
        self.policy = _network(outputs=2)
        self._value = _network(outputs=1)
        parameters = [*self.policy.parameters(), *self._value.parameters()]
        self._optimizer = torch.optim.Adam(parameters, lr=1e-3)

    def learn(self, games: Sequence[Games]) -> None:
        """Improve the policy by what happened in a round."""
        with torch.no_grad():
            advantages = torch.cat([self._advantages(each) for each in games])
            states = torch.cat([each.states for each in games])
            actions = torch.cat([each.actions for each in games])
            targets = advantages + self._value(states).squeeze(1)
            before = self._log_chances(states, actions)
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(8):
            for batch in torch.split(torch.randperm(len(states)), 256):
                ratio = (self._log_chances(states[batch], actions[batch]) - before[batch]).exp()
                gain = torch.min(
                    ratio * advantages[batch], ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantages[batch]
                )
                error = self._value(states[batch]).squeeze(1) - targets[batch]
                self._optimizer.zero_grad()
                (error.square().mean() * 0.5 - gain.mean()).backward()
                self._optimizer.step()

    def _log_chances(self, states: Tensor, actions: Tensor) -> Tensor:
        scores: Tensor = self.policy(states).log_softmax(dim=1)
        return scores.gather(1, actions.unsqueeze(1)).squeeze(1)

    def _advantages(self, games: Games) -> Tensor:
        """The gain of each action over what was expected, shape ``(steps,)``."""
        values = self._value(games.states).squeeze(1)
        advantages = torch.zeros_like(values)
        later = 0.0
        for step in reversed(range(len(values))):
            cut = bool(games.cuts[step])
            if cut:
                later = 0.0
            # Where a game was cut short, the state before is the nearest to what came after.
            after = 0.0 if games.ends[step] else float(values[step if cut else step + 1])
            surprise = 1.0 + _DISCOUNT * after - float(values[step])
            later = surprise + _DISCOUNT * _TRACE_DECAY * later
            advantages[step] = later
        return advantages


def _network(outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    )


def drive(options: argparse.Namespace, workers: Sequence[str]) -> None:
    """Play rounds and learn from them until the game is solved; runs on the agent."""
    agent = Agent()
    with (
        tempfile.TemporaryDirectory() as weights,
        checkpoint.publish({"policy": agent.policy}, weights) as publishing,
    ):
        observers: list[Any] = [  # references whose methods are those of an observer
            rpc.remote(worker, Observer, args=(weights, options.seed * 1000 + rank))
            for rank, worker in enumerate(workers[1:])
        ]
        _learn(options, agent, publishing, observers)
        for each in observers:
            each.rpc_sync().close()


def _learn(
    options: argparse.Namespace,
    agent: Agent,
    publishing: checkpoint.Publishing,
    observers: Sequence[Any],
) -> None:
    solved_at = float(gymnasium.spec(_ENVIRONMENT).reward_threshold or 0.0)
    print(f"1 agent, {len(observers)} observers, backend {options.backend}", flush=True)
    returns: list[float] = []
    last = deque[float](maxlen=_GAMES_TO_JUDGE)
    version = 0  # the first one
    bar = tqdm(total=options.rounds, unit=" rounds", disable=None)
    for number in range(1, options.rounds + 1):
        # All observers play at the same time; each call lasts as long as its share.
        shares = [each.rpc_async(timeout=0).play(version, options.steps) for each in observers]
        games = torch.futures.wait_all(shares)
        agent.learn(games)
        version = publishing.update(number).number
        returns += [value for each in games for value in each.returns]
        last.extend(value for each in games for value in each.returns)
        mean = sum(last) / len(last) if last else 0.0
        bar.update()
        bar.set_postfix(mean_return=f"{mean:.0f}")
        if number % 5 == 0:
            bar.write(
                f"round {number}: {len(returns)} games, mean return of the last 100 {mean:.1f}"
            )
        if len(last) == _GAMES_TO_JUDGE and mean >= solved_at:
            break
    bar.close()
    verdict = "solved" if mean >= solved_at else f"not solved, which takes {solved_at:.0f}"
    print(f"mean return of the last {len(last)} of {len(returns)} games: {mean:.1f}, {verdict}")
    _draw(returns, solved_at, options)


def _draw(returns: Sequence[float], solved_at: float, options: argparse.Namespace) -> None:
    drawn = pictures.figure(9, 4)
    axes = drawn.subplots()
    axes.plot(returns, ".", markersize=3, alpha=0.4, label="one game")
    window = [returns[max(0, end - _GAMES_TO_JUDGE) : end] for end in range(1, len(returns) + 1)]
    axes.plot([sum(w) / len(w) for w in window], label="mean of the last 100")
    axes.axhline(solved_at, color="black", linestyle=":", label="solved")
    axes.set(xlabel="game", ylabel="return")
    axes.legend()
    pictures.save(drawn, options.output / "cartpole.png")


def main() -> int:
    """Read the command line and run."""
    parser = taking_part.parser(__doc__, "agent:1 observer:2,service", output="getting_started")
    parser.add_argument(
        "--rounds", type=taking_part.positive, default=100, help="at most (%(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=taking_part.positive,
        default=1024,
        help="per observer and round (%(default)s)",
    )
    return taking_part.run(parser.parse_args(), taking_part.Job(drive, fewest=2))


if __name__ == "__main__":
    sys.exit(main())
