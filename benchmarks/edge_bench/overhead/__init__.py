"""What a coordinator costs: per round, per device, per page."""
