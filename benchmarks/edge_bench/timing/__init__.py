"""Speed of steps, codecs, simulation and exported models."""
