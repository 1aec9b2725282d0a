"""The numeric core: randomness, bit sets, codecs, coupling, folding, channel groups. numpy; Pillow for one codec."""
