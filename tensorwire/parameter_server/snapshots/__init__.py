"""Snapshots on disk: what they say of tables and dense parameters, how they are read and checked.

``saved`` describes a table or dense group as JSON, without pickles. ``fit`` compares that with a
declaration. ``kept`` stands for what nobody has declared yet. ``contents`` reads and checks.
"""
