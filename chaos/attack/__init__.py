"""A training job under the constant traffic of somebody who has no key.

``python -m chaos.attack --help`` says how to run it. ``job`` starts the job, whose workers are in
``training``; ``surroundings`` finds its processes, their memory and their ports, and ``recording``
the bytes that members send each other; ``stranger`` is the attacker's process, which does what
``means`` lists; ``judge`` says whether the job noticed, and whether its rows have the bits of an
undisturbed run.
"""
