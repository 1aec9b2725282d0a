"""Data sets, those of a user too, and their division over devices."""
