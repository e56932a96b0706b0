"""The algorithms, a file each family. Every file has a table `ALGORITHMS`, which the registry reads."""
