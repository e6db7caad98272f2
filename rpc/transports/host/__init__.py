"""Memory that workers on one host share."""
