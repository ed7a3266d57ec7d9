"""Activations: capture, the HDF5 store, and batches of adjacent tokens read from it."""

from tsae.activations.store import ActivationStore

__all__ = ["ActivationStore"]
