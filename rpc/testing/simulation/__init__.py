"""The deterministic simulator behind ``rpc.testing.simulate``.

``steps`` are all that can happen in a run, ``world`` carries them out, ``worker`` is one
simulated worker, ``ledger`` compares what is decided with what is true, ``generator`` draws
runs, ``runs`` plays and replays them, ``shrink`` makes a failing one short.
"""
