"""Making calls and serving them."""
