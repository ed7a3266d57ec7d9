"""Source: activations that training can read, from a store on disk or computed live."""

from __future__ import annotations

from typing import Any

from tsae.activations.batches.windows import Windows
from tsae.activations.catalogue import Catalogue


class Source(Catalogue):
    """Activations in batches: `tsae.activations.store.ActivationStore` or `tsae.activations.live.LiveSource`."""

    def windows(self, site: str, **options: Any) -> Windows:
        """Shuffled batches of tokens and their partners; see `tsae.activations.batches.windows.Windows`."""
        raise NotImplementedError
