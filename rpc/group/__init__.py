"""The group: bring-up, membership, signs of life, loss of a worker, shutdown."""
