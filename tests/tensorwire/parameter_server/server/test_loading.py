"""Kernels are there before a server's first push."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("numba")


@pytest.mark.slow
def test_a_process_that_loaded_for_workers_imports_little_for_its_first_optimizer() -> None:
    program = """
        import sys
        import torch
        from tensorwire.parameter_server.server.loading import load_for_workers

        load_for_workers()
        before = set(sys.modules)
        parameter = torch.nn.Parameter(torch.ones(2))
        parameter.grad = torch.ones(2)
        torch.optim.Adam([parameter]).step()
        new = set(sys.modules) - before
        assert len(new) < 20, new  # of some 800
        assert not torch.cuda.is_initialized()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


@pytest.mark.slow
def test_a_server_that_loaded_its_kernels_loads_none_at_its_first_push() -> None:
    program = """
        import numpy as np
        from tensorwire import parameter_server as ps
        from tensorwire.parameter_server.kernels import numba_kernels, numba_updates
        from tensorwire.parameter_server.server.loading import load_kernels
        from tensorwire.parameter_server.declarations.spec import TableSpec
        from tensorwire.parameter_server.storage import tables
        from tensorwire.parameter_server.storage.table import Part, TableShard

        def loaded():
            compiled = {**vars(numba_kernels), **vars(numba_updates)}.items()
            return {(name, s) for name, k in compiled for s in getattr(k, "signatures", ())}

        assert not loaded()
        load_kernels()
        before = loaded()
        rule = ps.RowwiseAdagrad(lr=0.1)
        table = TableShard(TableSpec("items", 64, rule, ps.Uniform(0.1, seed=3)), numba_kernels)
        ids, rows = np.arange(1000, dtype=np.int64), np.empty((1000, 64), np.float32)
        for time in range(3):
            places = table.pull(ids, rows, time)
            table.apply([Part(ids, np.ones_like(rows), places)], time)
        more = TableSpec("more", 64, rule, ps.Uniform(0.1, seed=3))
        two = [table, TableShard(more, numba_kernels)]
        for time in range(2):
            places = tables.pull(numba_kernels, two, (500, 500), ids, rows, time)
            part = tables.ManyParts((500, 500), ids, np.ones_like(rows), places)
            tables.apply(numba_kernels, two, [part] * 2, time)
        assert loaded() == before, loaded() - before
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
