"""The numeric core: counter-based randomness, bit sets, codecs, channel groups, compaction. numpy only."""
