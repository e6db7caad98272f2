"""Copies that arrive piece by piece are kept when they are whole, and never mixed with others."""

from __future__ import annotations

import pytest
import torch

from tensorwire.pipeline.backups.copies import Key, Rest, StageCopy, checksum
from tensorwire.pipeline.backups.keeping import Keeper, Piece
from tensorwire.pipeline.backups.places import Seat
from tensorwire.pipeline.backups.shelf import Epoch
from tensorwire.pipeline.errors import SupersededError

_SEAT = Seat(1)
_FIRST: Key = ("parameter", "a")
_SECOND: Key = ("parameter", "b")


def _epoch(formation: int) -> Epoch:
    return Epoch(0, "driver", formation)


def _pieces(formation: int, version: int, value: float) -> list[Piece]:
    """A copy in two pieces, all of whose numbers are the same."""
    tensors = {key: torch.full((4,), value) for key in (_FIRST, _SECOND)}
    named = _epoch(formation), _SEAT, version
    total = checksum(tensors, Rest())
    return [
        Piece(*named, (_FIRST,), (tensors[_FIRST],)),
        Piece(*named, (_SECOND,), (tensors[_SECOND],), Rest(), total),
    ]


def _arrive(keeper: Keeper, pieces: list[Piece]) -> StageCopy:
    for piece in pieces:
        keeper.arrive(piece)
    found = keeper.get(_SEAT, pieces[0].version)
    assert found is not None
    return found


def test_memory_of_a_copy_that_is_settled_is_used_for_the_next_but_one() -> None:
    keeper = Keeper("pipe")
    old = _arrive(keeper, _pieces(0, 1, 1.0))
    _arrive(keeper, _pieces(0, 2, 2.0))
    keeper.settle(_epoch(0), 2)
    new = _arrive(keeper, _pieces(0, 3, 3.0))
    assert new.tensors[_FIRST].data_ptr() == old.tensors[_FIRST].data_ptr()
    assert new.tensors[_SECOND].eq(3.0).all()


def test_a_half_copy_of_an_earlier_epoch_shares_no_memory_with_a_later_one() -> None:
    keeper = Keeper("pipe")
    old = _arrive(keeper, _pieces(0, 1, 1.0))
    _arrive(keeper, _pieces(0, 2, 2.0))
    keeper.settle(_epoch(0), 2)
    half, rest = _pieces(0, 3, 3.0)
    keeper.arrive(half)  # into the old copy's memory, where a slow thread may write still
    new = _arrive(keeper, _pieces(1, 3, 3.0))
    assert new.tensors[_FIRST].data_ptr() != old.tensors[_FIRST].data_ptr()
    with pytest.raises(SupersededError, match="was formed again"):
        keeper.arrive(rest)
    new.require_whole()
