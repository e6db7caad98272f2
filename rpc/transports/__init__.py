"""Ways to move frames between workers; see ``base`` for what they share."""
