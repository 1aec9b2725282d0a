"""How much of a masked network compaction removes and whether what is left says the same.

`zoo` holds the graphs, `masks` prunes them at random, `oracle` and `counting` compute in PyTorch what must remain,
`suite` exports, compacts and compares, `peers` runs Torch-Pruning beside it.
"""
