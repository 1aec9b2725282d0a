"""Speed of steps, codecs and simulation."""
