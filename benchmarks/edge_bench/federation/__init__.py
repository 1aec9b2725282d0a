"""Real processes on loopback: the demo, and a federation beside its simulation."""
