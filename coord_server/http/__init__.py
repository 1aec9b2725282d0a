"""REST under `/v1`: thin routes over `coord_server.coordinator`."""
