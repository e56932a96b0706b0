"""The spread of a model over ranks, as data."""
