"""Figures and rows of papers: a TOML file each, the command that runs them, their pages."""
