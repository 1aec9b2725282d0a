"""Lattice, in files: `method` has both halves and the whole algorithm; the others are its parts."""
