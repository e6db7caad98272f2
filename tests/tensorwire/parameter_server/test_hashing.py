"""Ids of names."""

from __future__ import annotations

import pytest
import torch

from tensorwire import parameter_server as ps

PARIS_PARIS_LONDON = [1657316678316814225, 1657316678316814225, 1412239898120216750]


def test_a_name_has_the_same_id_in_every_process() -> None:
    assert ps.hashed(["paris", b"paris", "london"]).tolist() == PARIS_PARIS_LONDON
    assert ps.hashed([]).dtype == torch.int64
    assert ps.hashed(["paris"], salt="city").tolist() != PARIS_PARIS_LONDON[:1]


def test_what_has_no_bytes_has_no_id() -> None:
    with pytest.raises(TypeError, match="7 is a int, neither text nor bytes"):
        ps.hashed([7])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="more than 16 bytes"):
        ps.hashed(["paris"], salt="x" * 17)
    with pytest.raises(TypeError, match=r"'paris' is one name, not several; give \['paris'\]"):
        ps.hashed("paris")
