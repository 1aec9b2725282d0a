"""How much of a masked network compaction removes and whether the outputs stay equal.

`zoo` holds the graphs, `masks` prunes them at random, `oracle` and `counting` compute in PyTorch what must remain,
`suite` exports, compacts and compares, `peers` runs Torch-Pruning beside it. `trained_models` trains what it compacts.
"""
