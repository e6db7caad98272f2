"""Backups of stages in other workers' memory, and going on from them when a worker is lost.

Decisions are in ``places`` (who owns and who backs up a stage, which version is gone back to),
``shelf`` (which copies a worker keeps) and ``coordinator`` (what the driver does when), all
without input or output. ``copies``, ``keeping`` and ``carrying_out`` move the tensors.
"""
