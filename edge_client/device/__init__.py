"""One device through a federation: before, in and after its rounds."""
