"""One federation in memory: a cache of the database by version. `federation` is its facade."""
