"""Studies: named variants of base runs, over seeds, run one after the other and reported together."""
