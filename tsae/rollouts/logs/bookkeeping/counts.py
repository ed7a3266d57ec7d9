"""Counts: how often something was found in a log; counts of parts of a log add up."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping


class Counts(defaultdict[str, Counter[str]]):
    """Counters by kind. Each keeps the order in which names were found first. JSON can hold it as it is."""

    def __init__(self) -> None:
        super().__init__(Counter)

    def add(self, state: Mapping[str, Mapping[str, int]]) -> None:
        """Add the counts of the next part of the log."""
        for kind, found in state.items():
            self[kind].update(found)
