"""The trainer's or reader's side: ``cluster`` is what a user holds, ``session`` talks to servers.

``table`` and ``dense`` are handles of what the servers keep; ``embedding`` has the modules,
``lookup`` the ids of one forward pass, ``prefetch`` asks ahead, ``cache`` keeps rows here,
``optimizer`` steps. ``splitting`` divides ids and gradients among shards, ``exchange`` holds what
goes out and comes back, ``account`` counts.
"""
