"""Writing to a disk that others write to as well, and that may be full."""
