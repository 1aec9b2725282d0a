"""Commands without a room of their own, the exit codes of all, and how signals end them."""
