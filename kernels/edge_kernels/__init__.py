"""The numeric core: counter-based randomness, bit sets, codecs, coupling, folding, channel groups. numpy only."""
