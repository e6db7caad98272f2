"""Random numbers of a stage: seeded for each micro-batch, or kept so that they can be drawn again.

With a seed, what a stage draws depends on the seed, the step, the stage and the
micro-batch, and on nothing else: neither on the schedule nor on who else draws.
"""

from __future__ import annotations

from remote_module.randomness import RandomState, recorded, replayed, require_seed, seeded

__all__ = ["RandomState", "recorded", "replayed", "require_seed", "seed_of", "seeded"]

_PRIME = 0x9E3779B97F4A7C15  # of splitmix64, which spreads neighbouring numbers far apart


def seed_of(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Returns the seed of one stage's forward pass of one micro-batch.

    Args:
        seed: of the pipeline.
        step: number of the step.
        stage: number of the stage.
        microbatch: number of the micro-batch.
    """
    mixed = seed
    for number in (step, stage, microbatch):
        mixed = (mixed + number + 1) * _PRIME % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63
