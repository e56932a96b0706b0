"""The techniques of parallelism, one file each, and the processes they run on."""
