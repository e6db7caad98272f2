"""The deterministic simulator behind ``rpc.testing.simulate``: what happens, and what must hold.

``steps`` are the words a run is told in, ``world`` carries them out, ``worker``
is one simulated worker, ``ledger`` keeps its own books and finds what must not
be, ``generator`` makes up runs, ``runs`` plays and replays them, ``shrink`` makes
a failing one short.
"""
