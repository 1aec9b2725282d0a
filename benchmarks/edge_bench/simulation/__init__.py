"""Federations in one process or several, without HTTP: runs, searches."""
