"""Figures and rows of papers: a TOML file each, the command that runs them, their pages.

`repeat` runs any simulation for several seeds and keeps the runs as a reproduction's are kept.
"""
