"""Other libraries' training loops on top of this one; each module needs its library."""
