"""Plays thousands of simulated groups, clusters and jobs on all cores: ``make simulate``.

Prints progress and a summary; stops at the first seed that breaks a rule and
prints its transcript. At the end it plays a group of a thousand workers.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time

from tests.seeded_games import BrokenGameError, check_seeds
from tests.simulation.group import (
    SimulationError,
    SimulationReport,
    simulate,
    simulate_group,
    simulate_silence,
)
from tests.tensorwire.launch.game import check_game as check_job
from tests.tensorwire.launch.game import shorten_game as shorten_job
from tests.tensorwire.parameter_server.game import check_games
from tests.tensorwire.parameter_server.game.plans import (
    draw_plan_with_comings,
    draw_plan_with_files,
    draw_plan_with_leases,
    draw_plan_with_moving_files,
    draw_plan_with_samples,
    draw_plan_with_sleepers,
)
from tests.tensorwire.pipeline.backup_game import check_game as check_pipeline
from tests.tensorwire.pipeline.backup_game import shorten_game as shorten_pipeline

_BATCH = 250


def _play(batch: tuple[int, int]) -> tuple[SimulationReport, SimulationReport] | str:
    """Plays some seeds; those that take longer are fewer."""
    first, end = batch
    try:
        reports = simulate(range(first, end)), simulate_silence(range(first // 4, end // 4))
    except SimulationError as error:
        return str(error)
    return _play_games(first, end) or reports


def _play_games(first: int, end: int) -> str:
    """Plays clusters of parameter servers, pipelines and jobs; returns what was broken."""
    every, tenth = range(first, end), range(first // 10, end // 10)
    try:
        check_games(every)
        check_games(every[::2], draw_plan_with_samples)
        check_games(every[1::2], draw_plan_with_leases)
        check_games(every[::2], draw_plan_with_files)
        check_games(every[::4], draw_plan_with_comings)
        check_games(every[1::4], draw_plan_with_moving_files)
        check_seeds(check_pipeline, every, shorten_pipeline)
        check_seeds(check_job, tenth, shorten_job)
        check_games(tenth, draw_plan_with_sleepers)
    except BrokenGameError as error:
        return str(error)
    return ""


def _sum(one: SimulationReport, other: SimulationReport) -> SimulationReport:
    """Both together; the seconds are those of all processes."""
    return SimulationReport(
        one.runs + other.runs,
        one.steps + other.steps,
        one.messages + other.messages,
        one.seconds + other.seconds,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    return parser.parse_args()


def main() -> int:
    """Returns the exit status."""
    wanted = _arguments()
    end = wanted.first + wanted.seeds
    batches = [(s, min(s + _BATCH, end)) for s in range(wanted.first, end, _BATCH)]
    began = time.perf_counter()
    totals = [SimulationReport(), SimulationReport()]
    with multiprocessing.get_context("spawn").Pool(wanted.jobs) as pool:
        for outcome in pool.imap(_play, batches):
            if isinstance(outcome, str):
                print(f"\n{outcome}")
                return 1
            totals = [_sum(*both) for both in zip(totals, outcome, strict=True)]
            done = f"\r{totals[0].runs} of {wanted.seeds} seeds"
            print(done, end="", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - began
    print(f" in {seconds:.0f} s", file=sys.stderr)
    print(totals[0])
    print(f"silence: {totals[1]}")
    for workers in (100, 1000):
        print(simulate_group(workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
