"""Collects what the servers and this worker can say of themselves."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from typing import TYPE_CHECKING

from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.counted import progress_of
from tensorwire.parameter_server.declarations.samplers import SamplerSpec
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST
from tensorwire.parameter_server.opaque import Json

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster


def told_of(cluster: Cluster) -> dict[str, Json]:
    """Returns the facts for ``Cluster.stats``."""
    session = cluster.session
    session.servers.require_own_process()
    session.refresh()
    answers = session.servers.ask_all(messages.Describe())
    view = session.view
    return {
        "cluster": cluster.name,
        "epoch": view.epoch,
        "generation": view.generation,
        "coordinator": view.coordinator.name,
        "trainers": {t.client.name: t.number for t in view.trainers},
        "servers": {s.name: each for s, each in answers.items() if each is not LOST},
        "step": cluster.step,
        "bad_steps": cluster.bad_steps,
        "rollbacks": session.rollbacks,
        "samples": _samples(cluster),
        **cluster.account.told(),
    }


def _samples(cluster: Cluster) -> dict[str, Json]:
    """The progress of each sampler, if the server that keeps the accounts is reached."""
    told = {}
    with contextlib.suppress(errors.UnreachableError):
        for name, text in cluster.session.view.samplers.items():
            account = cluster.counting.account_of(name)
            told[name] = asdict(progress_of(SamplerSpec.decode(text), account))
    return told
