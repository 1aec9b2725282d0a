"""Whether the graphs of an export equal the module: every operator, and whole networks."""
