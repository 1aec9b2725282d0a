"""Federations in one process or several, without HTTP: runs, repeats, searches."""
