"""The stages of a game as numbers, the program that trains them, and its undisturbed run."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tensorwire.pipeline.backups.coordinator import Kind
from tensorwire.pipeline.backups.places import Seat


@dataclass(frozen=True)
class State:
    """A stage: how many optimizer steps it made, and what came of them."""

    steps: int
    weights: int
    gradient: int = 0

    def trained(self, seat: Seat, batch: int, weights: tuple[int, ...]) -> State:
        mixed = hash((self.gradient, seat.stage, seat.replica, batch, weights))
        return State(self.steps, self.weights, mixed)

    def stepped(self) -> State:
        return State(self.steps + 1, hash((self.weights, self.gradient)), self.gradient)

    def clipped(self) -> State:
        return State(self.steps, self.weights, hash((self.gradient, 3)))

    def cleared(self) -> State:
        return State(self.steps, self.weights)


def program(seed: int, batch: int) -> list[Kind | str]:
    """One pass of the loop's body over a batch, the same in every life of the driver."""
    dice = random.Random(seed * 1000 + batch)
    body: list[Kind | str] = ["train"] * dice.choice([1, 1, 1, 2, 3])
    if dice.random() < 0.3:
        body.append("clip")
    return [*body, "step", *(["clear"] if dice.random() < 0.9 else [])]


def reference(seed: int, seats: list[Seat], batches: int) -> tuple[list[int], dict[Seat, State]]:
    """The losses and the final stages of an undisturbed run."""
    states = {seat: State(0, seat.stage) for seat in seats}
    losses = []
    for batch in range(batches):
        for each in program(seed, batch):
            if each == "train":
                weights = tuple(states[seat].weights for seat in seats)
                losses.append(hash((batch, weights)))
                states = {s: states[s].trained(s, batch, weights) for s in seats}
            else:
                states = {seat: change(str(each), state) for seat, state in states.items()}
    return losses, states


def change(work: str, state: State) -> State:
    """A stage after what the program does to each."""
    return {"step": State.stepped, "clip": State.clipped, "clear": State.cleared}[work](state)
