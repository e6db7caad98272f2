"""Mapped memory: reused when its array is dead, unmapped when nobody needs it."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from rpc.transports.host.regions import Region, view_of
from rpc.transports.tensorwire import receive_buffers
from rpc.transports.tensorwire.receive_buffers import ReceiveBuffers


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("\n")


def address_of(array: object) -> int:
    return torch.frombuffer(array, dtype=torch.uint8, count=1).data_ptr()


def test_memory_is_used_again_when_its_array_is_dead() -> None:
    buffers = ReceiveBuffers(1 << 30)
    first = buffers.take(100_000)
    address = address_of(first)
    second = buffers.take(100_000)
    assert address_of(second) != address
    tensor = torch.frombuffer(first, dtype=torch.uint8, count=100_000)
    del first
    assert address_of(buffers.take(100_000)) != address
    del tensor
    assert address_of(buffers.take(120_000)) == address
    buffers.close()


def test_memory_in_use_outlives_a_garbage_collection() -> None:
    buffers = ReceiveBuffers(1 << 30)
    array = buffers.take(100_000)
    address = address_of(array)
    gc.collect()
    del array
    assert address_of(buffers.take(100_000)) == address
    buffers.close()
    assert not mapped(address)


def test_memory_comes_back_from_a_cycle_of_garbage() -> None:
    buffers = ReceiveBuffers(1 << 30)
    cycle: list[object] = [buffers.view(100_000)]
    address = address_of(cycle[0])
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert address_of(buffers.take(100_000)) == address
    buffers.close()


def test_idle_memory_is_bounded() -> None:
    buffers = ReceiveBuffers(1 << 17)
    addresses = []
    for _ in range(2):
        arrays = [buffers.take(1 << 16) for _ in range(4)]
        addresses = [address_of(array) for array in arrays]
        del arrays
        gc.collect()
    assert sum(map(mapped, addresses)) <= 2
    buffers.close()
    assert not any(map(mapped, addresses))


def test_many_small_arrays_are_few_mappings() -> None:
    buffers = ReceiveBuffers(1 << 20)
    before = mappings()
    kept = []
    for _ in range(300):
        kept.append(buffers.view(70_000))
        kept[-1][0] = 1
    assert mappings() - before < 30
    buffers.close()


def test_large_memory_is_at_most_an_eighth_too_large() -> None:
    lengths = [(1 << 20) + 1, (3 << 20) - 1, 400 << 20, (1 << 30) + 1, 1 << 36]
    sizes = [receive_buffers._size_for(length) for length in lengths]
    assert all(a <= b <= a * 9 / 8 for a, b in zip(lengths, sizes, strict=True))
    assert all(size % 4096 == 0 for size in sizes)


def test_sizes_never_shrink_as_lengths_grow() -> None:
    sizes = [receive_buffers._size_for(length) for length in range(1, 20 << 20, 65_537)]
    assert all(a <= b for a, b in pairwise(sizes))


def test_larger_idle_memory_is_used_unless_it_is_twice_as_large() -> None:
    buffers = ReceiveBuffers(1 << 30)
    array = buffers.take(15 << 20)
    address = address_of(array)
    del array
    assert address_of(buffers.take(7 << 20)) != address
    assert address_of(buffers.take(9 << 20)) == address
    buffers.close()


def test_idle_memory_gives_way_to_what_was_used_since() -> None:
    buffers = ReceiveBuffers(1 << 20)
    old = [buffers.take(1 << 16) for _ in range(16)]
    addresses = [address_of(array) for array in old]
    del old
    array = buffers.take(1 << 19)
    address = address_of(array)
    del array
    assert mapped(address)
    assert sum(map(mapped, addresses)) == 8
    assert address_of(buffers.take(1 << 19)) == address
    buffers.close()


def test_ordinary_memory_is_taken_when_nothing_can_be_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(size: int) -> Region:
        raise OSError(12, f"mmap of {size} bytes: Cannot allocate memory")

    buffers = ReceiveBuffers(1 << 20)
    idle = buffers.take(1 << 16)
    address = address_of(idle)
    del idle
    monkeypatch.setattr(receive_buffers, "Region", refuse)
    view = buffers.view(100_000)
    view[:] = b"x" * 100_000
    assert not mapped(address)
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes cannot be allocated"):
        buffers.take(1 << 60)
    buffers.close()


def test_what_is_in_use_survives_closing() -> None:
    buffers = ReceiveBuffers(1 << 20)
    array = buffers.take(1000)
    address = address_of(array)
    buffers.close()
    view_of(array, 1000)[:] = b"x" * 1000
    assert mapped(address)
    del array
    assert not mapped(address)


def test_a_region_that_cannot_be_is_refused_and_leaves_nothing() -> None:
    before = mappings()
    with pytest.raises(OSError, match="mmap of"):
        Region(1 << 62)
    with pytest.raises(OSError, match="mmap of"):
        Region(4096, 0 if Path("/dev/stdin").is_char_device() else 999)
    assert mappings() <= before + 2
