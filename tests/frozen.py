"""Keeps the collector from looking at what was imported, in processes that are forked later, too.

Each collection would touch, and so copy, the memory of all of it: a third of a second of processor
time per process, and more than one for a process that ends as any does.
"""

import gc

gc.collect()
gc.freeze()
