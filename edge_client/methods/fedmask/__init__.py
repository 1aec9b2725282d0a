"""FedMask, in files: `method` has both halves, `wire` what travels."""
