"""Samplers of a cluster: their account, their progress, their state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from tensorwire.parameter_server.decisions.files import Begun
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.declarations.arguments import whole
from tensorwire.parameter_server.declarations.samplers import SamplerSpec
from tensorwire.parameter_server.errors import DeclarationError
from tensorwire.parameter_server.opaque import Json

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of all trainers together. Numbers are those of samples, of all epochs; where the
    samples are files, those of files.

    Args:
        epoch: the first of which a sample is not trained; the number of epochs at the end.
        trained: samples whose push is part of the state; files that are trained to their end.
        in_flight: those of the batches that trainers are at; under SSP and async, of all that
            they have taken and not pushed. Files that are begun, and those that trainers have.
        left: the others.
    """

    epoch: int
    trained: int
    in_flight: int
    left: int

    @property
    def total(self) -> int:
        """All samples of all epochs."""
        return self.trained + self.in_flight + self.left


class Counted:
    """The account and the epochs of a sampler, be it of batches or of files.

    Args:
        cluster: the cluster.
        spec: what all trainers have agreed about.
        rank: this trainer's, if the assignment is static.

    Attributes:
        spec: likewise.
    """

    def __init__(self, cluster: Cluster, spec: SamplerSpec, rank: int = 0) -> None:
        self.spec = spec
        self._rank = rank
        self._cluster = cluster
        self._epoch: int | None = None

    def set_epoch(self, epoch: int | None) -> None:
        """Has the next :meth:`track` give out what is left of one epoch only.

        All trainers must do so alike.

        Args:
            epoch: from 0; None for all epochs one after the other, which is the default.

        Raises:
            TypeError: it is no whole number.
            ValueError: there is no such epoch.
        """
        if epoch is not None:
            whole("set_epoch", "epoch", epoch, least=0, below=self.spec.epochs)
        self._epoch = epoch

    def __len__(self) -> int:
        """The batches, or files, of all trainers together, in all epochs, or in that of
        :meth:`set_epoch`.
        """
        first, behind = self._window
        return behind - first

    def state_dict(self) -> dict[str, Json]:
        """The declaration, and the batches of all trainers that are part of the state now.

        A checkpoint of a program needs it only to be sure: every snapshot of the cluster has the
        account.

        Returns:
            Plain data: ``sampler``, the declaration; ``trained``, runs of the numbers of batches,
            or files, each as its first and the one behind its last; and ``begun``, of each file
            of which a part is trained its number, how many pushes trained it, and the position
            that they have reached, as text.
        """
        account = self._cluster.counting.account_of(self.spec.name)
        trained = [list(each) for each in account.done]
        begun = [each.encode() for each in account.begun]
        return {"sampler": asdict(self.spec), "trained": trained, "begun": begun}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Makes sure that the cluster is where it was, or further: changes nothing.

        Args:
            state: of :meth:`state_dict`.

        Raises:
            DeclarationError: it is of another sampler, or of one that was declared otherwise.
            ValueError: it is no such state, or the cluster's rows lack batches that were part of
                them then.
        """
        try:
            saved = SamplerSpec(**state["sampler"])
            trained = [_run(*each) for each in state["trained"]]
            begun = [Begun.decode(each) for each in state.get("begun", ())]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"load_state_dict: state={state!r} is not of state_dict() of a sampler"
            ) from error
        differences = self.spec.differences(saved)
        if differences:
            raise DeclarationError(
                f"sampler {self.spec.name!r} was declared otherwise when this state was saved: "
                f"{'; '.join(differences)}"
            )
        account = self._cluster.counting.account_of(self.spec.name)
        lacking = sum(1 for run in trained for _ in account.untrained(range(*run)))
        reached = {each.file: each.pushes for each in account.begun}
        left = [each.file for each in begun if reached.get(each.file, 0) < each.pushes]
        lacking += len(list(account.untrained(left)))
        if lacking:
            what = "files" if self.spec.files else "batches"
            raise ValueError(
                f"load_state_dict: {lacking} {what} of sampler {self.spec.name!r} that were "
                "trained when this state was saved are not part of the cluster's rows; restore the "
                "cluster from a snapshot of that moment or later (ps.connect(restore=...))"
            )

    @property
    def progress(self) -> Progress:
        """The progress of all trainers, as a server says."""
        account = self._cluster.counting.account_of(self.spec.name)
        return progress_of(self.spec, account)

    @property
    def _window(self) -> tuple[int, int]:
        """The numbers of the batches that are given out: the first, and behind the last."""
        spec, epoch = self.spec, self._epoch
        if epoch is None:
            return 0, spec.batches
        return epoch * spec.in_epoch, (epoch + 1) * spec.in_epoch


def _run(begin: Json, behind: Json) -> tuple[int, int]:
    """A run of numbers, as :meth:`Counted.state_dict` writes it."""
    whole("load_state_dict", "trained", begin, least=0)
    whole("load_state_dict", "trained", behind, least=begin + 1)
    return begin, behind


def progress_of(spec: SamplerSpec, account: Account) -> Progress:
    """The progress that an account tells of."""
    total = spec.samples_before(spec.batches)
    trained = sum(spec.samples_before(b) - spec.samples_before(a) for a, b in account.done)
    under_way = _under_way(spec, account)
    in_flight = sum(spec.place_of(each)[2] for each in under_way)
    behind = account.done[0][1] if account.done and account.done[0][0] == 0 else 0
    return Progress(behind // spec.in_epoch, trained, in_flight, total - trained - in_flight)


def _under_way(spec: SamplerSpec, account: Account) -> set[int]:
    """The batches that trainers have under way."""
    if spec.num_replicas:
        shares = [spec.share(rank, 0, spec.batches) for rank in range(spec.num_replicas)]
        lefts = [account.untrained(share) for share in shares]
    else:
        lefts = [account.remaining(who, 0, spec.batches) for who in account.deal.members]
    nexts = [next(left, None) for left in lefts]
    leased = [number for each in account.leases for run in each.open for number in range(*run)]
    begun = [each.file for each in account.begun]
    return {each for each in [*nexts, *leased, *begun] if each is not None}
