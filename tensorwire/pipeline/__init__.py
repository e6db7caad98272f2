"""Pipelines: stages of a model on several workers, micro-batches that flow through them."""
