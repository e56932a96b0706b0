"""The fastest layouts of a recipe on a cluster, found by lower bounds."""
