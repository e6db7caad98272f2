"""Tensors of other layouts than strided survive the codec, and stay what they were in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rpc.errors import EncodeError
from rpc.wire.codec import decode, encode
from tests.rpc.round_trips import round_trip, round_trip_detached


def sparse_matrix(layout: torch.layout) -> Tensor:
    dense = torch.tensor([[0.0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 3, 0], [0, 0, 0, 4]])
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        return dense.to_sparse(layout=layout, blocksize=(2, 2))
    return dense.to_sparse(layout=layout)


@pytest.mark.parametrize(
    "layout",
    [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc],
    ids=str,
)
def test_sparse_tensors_travel_as_their_strided_parts(layout: torch.layout) -> None:
    sent = sparse_matrix(layout)
    encoded = encode([sent, sent])
    assert all(tensor.layout is torch.strided for tensor in encoded.tensors)
    assert encoded.plain
    arrived, again = decode(encoded.payload, encoded.tensors, ())
    assert arrived is again
    assert arrived.layout is layout
    assert torch.equal(arrived.to_dense(), sent.to_dense())
    assert not arrived.requires_grad


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_sparse_leaves_that_require_grad_arrive_as_such(layout: torch.layout) -> None:
    sent = sparse_matrix(layout).requires_grad_()
    for arrived in (round_trip_detached(sent), no_grad_round_trip(sent)):
        assert arrived.requires_grad
        assert arrived.is_leaf
        assert torch.equal(arrived.detach().to_dense(), sent.detach().to_dense())


def no_grad_round_trip(value: object) -> Any:
    with torch.no_grad():
        return round_trip_detached(value)


@pytest.mark.parametrize("coalesced", [True, False])
def test_the_coalesced_flag_of_sparse_tensors_survives(coalesced: bool) -> None:
    sent = torch.sparse_coo_tensor([[0, 2, 0]], [1.0, 2.0, 4.0], (3,))
    sent = sent.coalesce() if coalesced else sent
    for tensor in (sent, sent.detach().requires_grad_()):
        arrived = round_trip_detached(tensor)
        assert arrived._nnz() == sent._nnz()
        assert arrived.is_coalesced() is coalesced
        assert arrived.detach().to_dense().tolist() == [5.0, 0.0, 2.0]


@pytest.mark.parametrize("coalesced", [True, False])
def test_a_coo_tensor_that_requires_grad_travels_whole(coalesced: bool) -> None:
    leaf = torch.sparse_coo_tensor([[0, 2, 0]], [1.0, 2.0, 4.0], (3,))
    leaf = (leaf.coalesce() if coalesced else leaf).requires_grad_()
    assert encode([leaf, 1]).tensors == [leaf]
    assert round_trip([leaf, 1])[0] is leaf


def test_gradients_flow_back_through_the_values_of_a_compressed_tensor() -> None:
    leaf = sparse_matrix(torch.sparse_csr).requires_grad_()
    arrived = round_trip(leaf)
    (arrived.to_dense() * 3).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.to_dense()[0, 1].item() == 3.0


def test_a_compressed_parameter_stays_one_and_takes_part_in_graphs() -> None:
    sent = nn.Parameter(sparse_matrix(torch.sparse_csr))
    arrived = round_trip_detached(sent)
    assert type(arrived) is nn.Parameter
    assert arrived.requires_grad
    assert arrived.layout is torch.sparse_csr
    in_graph = round_trip(sent)
    assert isinstance(in_graph, nn.Parameter)
    (in_graph.to_dense() * 3).sum().backward()
    assert sent.grad is not None
    assert sent.grad.to_dense()[0, 1].item() == 3.0


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_exotic_tensors_arrive_equal() -> None:
    quantized = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.1, 3, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    arrived = round_trip([quantized, nested, torch.empty(3, device="meta")])
    assert torch.equal(arrived[0].int_repr(), quantized.int_repr())
    assert arrived[0].q_scale() == quantized.q_scale()
    assert [part.tolist() for part in arrived[1].unbind()] == [[1.0, 1.0], [0.0, 0.0, 0.0]]
    assert arrived[2].is_meta
    assert arrived[2].shape == (3,)


@pytest.mark.slow
def test_jagged_tensors_arrive_equal() -> None:
    sent = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    parts = round_trip(sent).unbind()
    assert [part.tolist() for part in parts] == [[1.0, 1.0], [0.0, 0.0, 0.0]]


@pytest.mark.slow
def test_gradients_flow_back_through_a_jagged_tensor() -> None:
    leaf = torch.arange(1.0, 6.0, requires_grad=True)
    sent = torch.nested.nested_tensor_from_jagged(leaf * 2, torch.tensor([0, 2, 5]))
    arrived = round_trip(sent)
    assert [part.tolist() for part in arrived.unbind()] == [[2.0, 4.0], [6.0, 8.0, 10.0]]
    (arrived * arrived).values().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [8.0, 16.0, 24.0, 32.0, 40.0]


@pytest.mark.slow
def test_a_jagged_leaf_arrives_as_one_and_goes_with_others_of_its_shape() -> None:
    sent = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    weights: Any = nn.Parameter(sent)
    weights.name_of_ours = "w"
    for arrived, other in (
        round_trip_detached([weights, sent]),
        no_grad_round_trip([weights, sent]),
    ):
        assert arrived.requires_grad
        assert arrived.is_leaf
        assert isinstance(arrived, nn.Parameter)
        assert arrived.name_of_ours == "w"
        (arrived * other).values().sum().backward()
        assert arrived.grad.values().tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


class Wrapped(Tensor):
    """Has its numbers in another tensor, which autograd does not see."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        wrapped = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (of,) = args
        return cls(func(of.inner))


def test_a_tensor_that_its_graph_does_not_reach_through_is_named() -> None:
    leaf = Wrapped(torch.ones(2)).requires_grad_()
    assert encode([leaf, leaf.detach()]).severed is None
    assert encode([leaf.neg()]).severed is Wrapped
    assert encode([leaf.neg(), lambda: 0]).severed is Wrapped
    assert encode([leaf.neg().detach()]).severed is None


def test_a_layout_that_cannot_be_taken_apart_is_refused() -> None:
    with pytest.raises(EncodeError, match="mkldnn"):
        encode(torch.ones(2, 2).to_mkldnn())
