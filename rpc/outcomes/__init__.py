"""Futures, and the other places where the outcome of a call goes."""
