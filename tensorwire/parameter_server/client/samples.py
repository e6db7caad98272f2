"""A sampler of batches of which each sample counts once, whoever dies, joins or leaves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Sampler

from tensorwire.parameter_server.client.assignment import assignment
from tensorwire.parameter_server.client.permutation import Permutation
from tensorwire.parameter_server.client.tracking import Tracked
from tensorwire.parameter_server.decisions.samples import Account
from tensorwire.parameter_server.declarations.arguments import instance, whole
from tensorwire.parameter_server.declarations.samplers import SamplerSpec
from tensorwire.parameter_server.errors import DeclarationError

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of all trainers together. Numbers are those of samples, of all epochs.

    Args:
        epoch: the first of which a sample is not trained; the number of epochs at the end.
        trained: samples whose push is part of the state.
        in_flight: those of the batches that trainers are at; under SSP and async, of all that
            they have taken and not pushed.
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


class Samples(Sampler[list[int]]):
    """Batches of indices, for ``DataLoader(batch_sampler=...)``. Made by ``Cluster.samples``.

    All trainers together go through the epochs once. Servers keep the account of the batches
    whose pushes are part of the state; it goes back, and is restored, with everything else.

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
        self._tracked: Tracked | None = None
        self._permutations: dict[int, Permutation] = {}

    def __repr__(self) -> str:
        return f"Samples({self.spec})"

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
        """The batches of all trainers together, in all epochs, or in that of :meth:`set_epoch`."""
        first, behind = self._window
        return behind - first

    def __iter__(self) -> Iterator[list[int]]:
        """Yields indices of samples; for a loader that is tracked.

        Raises:
            RuntimeError: the loader is not tracked, so that nobody would know what was trained.
        """
        if self._tracked is None:
            raise RuntimeError(
                f"sampler {self.spec.name!r}: iterate over data.track(loader), not over the "
                "loader, so that it is known which samples were trained"
            )
        return _Reading(self._tracked)

    def state_dict(self) -> dict[str, Any]:
        """The declaration, and the batches of all trainers that are part of the state now.

        A checkpoint of a program needs it only to be sure: every snapshot of the cluster has the
        account.

        Returns:
            Plain data: ``sampler``, the declaration, and ``trained``, runs of the numbers of
            batches, each as its first and the one behind its last.
        """
        account = self._cluster.counting.account_of(self.spec.name)
        return {"sampler": asdict(self.spec), "trained": [list(each) for each in account.done]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
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
            trained = [(int(begin), int(behind)) for begin, behind in state["trained"]]
        except (KeyError, TypeError) as error:
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
        if lacking:
            raise ValueError(
                f"load_state_dict: {lacking} batches of sampler {self.spec.name!r} that were "
                "trained when this state was saved are not part of the cluster's rows; restore the "
                "cluster from a snapshot of that moment or later (ps.connect(restore=...))"
            )

    def track(self, loader: Iterable[Any]) -> Tracked:
        """The batches of a loader, each of which counts as trained with the next push.

        Yields this trainer's batches until all samples are trained, those of trainers that died
        included. While others have batches and this trainer has none it makes empty steps. After
        ``RolledBack``, which ``optimizer.step()`` raises, go on with the loop: it yields what is
        not trained from there on.

        Args:
            loader: a ``DataLoader`` whose ``batch_sampler`` this is.

        Returns:
            An iterable, for ``for`` or :func:`prefetch`.

        Raises:
            TypeError: it cannot be iterated over.
            ValueError: it has another batch sampler, or does not keep the order of batches.
        """
        instance("track", "loader", loader, Iterable, "a DataLoader")
        if getattr(loader, "batch_sampler", None) is not self:
            raise ValueError(
                f"track: the loader's batch_sampler is {getattr(loader, 'batch_sampler', None)!r}, "
                f"not this {self!r}; use DataLoader(dataset, batch_sampler=data)"
            )
        if not getattr(loader, "in_order", True):
            raise ValueError("track: the loader was made with in_order=False, so that it is not "
                             "known which batch is which; use in_order=True")  # fmt: skip
        assigned = assignment(self._cluster, self.spec, self._window, self._rank)
        tracked = Tracked(self._cluster, self.spec.name, assigned, loader, self._indices_of)
        self._tracked = tracked
        return tracked

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

    def _indices_of(self, numbers: list[int]) -> list[list[int]]:
        """The indices of the samples of some batches."""
        if not self.spec.shuffle:
            every = [self.spec.place_of(number) for number in numbers]
            return [list(range(first, first + count)) for _, first, count in every]
        found: list[list[int]] = []
        for epoch, places in _by_epoch(self.spec, numbers):
            positions = [np.arange(first, first + count) for first, count in places]
            indices = self._order(epoch)(np.concatenate(positions))
            ends = np.cumsum([count for _, count in places])[:-1]
            found += [each.tolist() for each in np.split(indices, ends)]
        return found

    def _order(self, epoch: int) -> Permutation:
        if epoch not in self._permutations:
            order = Permutation(self.spec.length, self.spec.seed, epoch)
            self._permutations = {epoch: order}
        return self._permutations[epoch]


class _Reading:
    """The indices that a loader reads; may go on after it has ended, as more was given out."""

    def __init__(self, tracked: Tracked) -> None:
        self._tracked = tracked

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        return self._tracked.next_indices()


def progress_of(spec: SamplerSpec, account: Account) -> Progress:
    """The progress that an account tells of."""
    total = spec.samples_before(spec.batches)
    trained = sum(spec.samples_before(b) - spec.samples_before(a) for a, b in account.done)
    if spec.num_replicas:
        shares = [spec.share(rank, 0, spec.batches) for rank in range(spec.num_replicas)]
        lefts = [account.untrained(share) for share in shares]
    else:
        lefts = [account.remaining(who, 0, spec.batches) for who in account.deal.members]
    nexts = [next(left, None) for left in lefts]
    leased = [number for each in account.leases for run in each.open for number in range(*run)]
    in_flight = sum(spec.place_of(each)[2] for each in [*nexts, *leased] if each is not None)
    behind = account.done[0][1] if account.done and account.done[0][0] == 0 else 0
    return Progress(behind // spec.in_epoch, trained, in_flight, total - trained - in_flight)


def _by_epoch(spec: SamplerSpec, numbers: list[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """First position and samples of each batch, those of one epoch together."""
    epoch, places = -1, list[tuple[int, int]]()
    for number in numbers:
        own, first, count = spec.place_of(number)
        if own != epoch and places:
            yield epoch, places
            places = []
        epoch = own
        places.append((first, count))
    if places:
        yield epoch, places
