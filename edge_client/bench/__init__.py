"""`maskfleet bench`: a model's variants measured on this machine or on a phone. `docs/bench.md` has the rules."""
