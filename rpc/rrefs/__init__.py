"""Remote references: handles, values, and the messages that keep them alive."""
