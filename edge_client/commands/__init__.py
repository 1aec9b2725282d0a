"""The commands of `maskfleet` beside `join`, and what they all do alike."""
