"""The trainer's or reader's side: ``cluster`` is what a user holds, ``session`` talks to servers.

``table`` and ``dense`` are handles of what the servers keep; ``embedding`` and ``collection`` have
the modules, ``features`` and ``lookup`` the ids of one forward pass, ``pooling`` sums bags,
``row_fetcher`` fetches rows, ``step_rows`` are those of one step, ``prefetch`` asks ahead,
``cache`` keeps rows here, ``optimizer`` steps. ``splitting`` divides ids and gradients among
shards, ``exchange`` holds what goes out and comes back, ``account`` counts.
"""
