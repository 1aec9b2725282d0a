"""What several methods share: local training, averaging, changes, masks, structures. Nothing here is a method."""
