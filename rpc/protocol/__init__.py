"""Decisions without input or output: an event goes in, what is to be done comes out.

Calls, references, liveness, retries, cancellation, shutdown, resumption of a connection.
"""
