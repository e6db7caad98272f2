"""Strings that name a worker and a device."""

from __future__ import annotations

import pytest
import torch

from remote_module.remote_device import RemoteDevice, parse_remote_device

CPU = torch.device("cpu")
SECOND_GPU = torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("text", "worker", "device"),
    [
        ("trainer0/cpu", "trainer0", CPU),
        ("trainer0", "trainer0", CPU),
        ("ps_0-b/cuda:1", "ps_0-b", SECOND_GPU),
        ("rank:0/cuda:1", 0, SECOND_GPU),
        ("rank:12", 12, CPU),
        ("stage:1/cuda:1", "stage:1", SECOND_GPU),
        ("stage:1", "stage:1", CPU),
        ("rank:0/cpu", 0, CPU),
    ],
)
def test_worker_and_device_are_read(text: str, worker: str | int, device: torch.device) -> None:
    assert parse_remote_device(text) == RemoteDevice(worker, device)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "/cuda:0",
        "w/cuda:0/cuda:1",
        "w//",
        "rank:",
        "rank:x",
        "rank:-1/cpu",
    ],
)
def test_bad_syntax_is_refused_with_the_text_and_the_valid_forms(text: str) -> None:
    with pytest.raises(ValueError, match="The valid format is '<workername>/<device>'") as error:
        parse_remote_device(text)
    assert str(error.value).startswith(f"Could not parse remote_device: {text}. ")


@pytest.mark.parametrize("text", ["cpu", "cuda:1", "meta"])
def test_a_device_without_a_worker_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="Could not parse remote_device"):
        parse_remote_device(text)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("w/foo", "Expected one of .+ device type at start of device string"),
        ("w/cpu2", "Invalid device string: 'cpu2'"),
        ("w/", "Device string must not be empty"),
    ],
)
def test_a_bad_device_gets_the_error_of_torch(text: str, complaint: str) -> None:
    with pytest.raises(RuntimeError, match=complaint):
        parse_remote_device(text)


def test_anything_but_a_string_is_refused() -> None:
    with pytest.raises(TypeError, match="must be a string, but got device"):
        parse_remote_device(torch.device("cpu"))  # type: ignore[arg-type]
