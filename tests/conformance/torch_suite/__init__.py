"""Runs the RPC tests that ship inside torch, unmodified, against this library or against torch.

``tensorwire.dropin`` makes torch's names ours, ``suites`` makes test classes of torch's
files, ``launch`` starts their workers, ``shard`` runs tests one after another,
``runner`` keeps shards busy, ``results`` and ``report`` tell what came of it.
Nothing here is imported by the library.
"""
