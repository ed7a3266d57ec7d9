"""Activations: capture, the HDF5 store, and batches of adjacent tokens read from it."""
