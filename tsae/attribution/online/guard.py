"""A guard over a target while training: lists the samples that would push it past a bound, and can down-weight them.

    guard = Guard(recorder, "direct (hard)", harmful="rises", bound=0.55)
    …                                            # forward and backward passes, within recorder.samples(…)
    listed = guard()                             # before gradients are clipped
    optimiser.step()

1. `Recorder.heading` says where the target is heading without this step; `Recorder.predicted` what each sample adds.
2. If both together stay within the bound, nothing is listed.
3. Else the samples with the largest harmful effects are listed, as few as bring it back to the bound. Their gradients
   are multiplied by `weight`.

Single samples' effects are large and opposed, and nearly cancel. So what is judged is their sum, and no sample is
touched for its own effect while the sum is harmless. The prediction is linear in the gradients of one step: it does not
know that the policy will sample other responses afterwards. Since the target's value is measured again at every refresh
of the recorder, errors do not add up.
"""

from __future__ import annotations

from math import isfinite
from typing import Literal

import numpy as np
import pandas as pd

from tsae.attribution.online.recorder import Recorder
from tsae.errors import TsaeError


class Guard:
    """Watches one target of a recorder.

    Args:
        recorder: of the run.
        target: name of the target.
        harmful: the direction that does harm.
        bound: value that the target shall not pass, in its units.
        weight: of listed samples, from 0 (left out) to 1 (listed only).

    Raises:
        TsaeError: for an unknown target, or a weight out of range.
    """

    def __init__(
        self,
        recorder: Recorder,
        target: str,
        *,
        harmful: Literal["rises", "falls"],
        bound: float,
        weight: float = 0.0,
    ) -> None:
        names = recorder.targets.names
        if target not in names:
            raise TsaeError(f"no target {target!r}", where="Guard", fix=f"The recorder has {', '.join(names)}.")
        if harmful not in ("rises", "falls") or not isfinite(bound):
            raise TsaeError(
                f"harmful={harmful!r} must be rises or falls, and bound={bound} a finite number", where="Guard"
            )
        if not 0 <= weight <= 1:
            raise TsaeError(f"weight={weight} is not between 0 and 1", where="Guard")
        self.recorder, self.column, self.bound, self.weight = recorder, names.index(target), bound, weight
        self.sign = 1.0 if harmful == "rises" else -1.0
        self._listed: list[pd.DataFrame] = []

    def __call__(self) -> pd.DataFrame:
        """Judge the step that is going on; call it after its last backward pass and before gradients are clipped.

        Returns:
            the samples that it lists, worst first: step, place (in the order of the step's micro-batches), effect (in
            units of the target), and their facts.
        """
        effect = self.recorder.predicted()[:, self.column]
        excess = self.sign * (self.recorder.heading[self.column] + effect.sum() - self.bound)
        listed = worst(self.sign * effect, excess)
        if len(listed) and self.weight < 1:
            weights = np.ones(len(effect))
            weights[listed] = self.weight
            self.recorder.down_weight(weights)
        facts = self.recorder.facts
        frame = pd.DataFrame(
            [
                {"step": self.recorder.step + 1, "place": int(i), "effect": effect[i]}
                | {key: v for key, v in facts[i].items() if not isinstance(v, list | np.ndarray)}
                for i in listed
            ]
        )
        self._listed.append(frame)
        return frame

    @property
    def listed(self) -> pd.DataFrame:
        """All samples that were listed so far."""
        some = [frame for frame in self._listed if len(frame)]
        return pd.concat(some, ignore_index=True) if some else pd.DataFrame(columns=["step", "place", "effect"])


def worst(harm: np.ndarray, excess: float) -> np.ndarray:
    """Indices of the fewest samples whose harm, (n,), adds up to the excess, worst first; all harmful ones if that is
    not enough."""
    if excess <= 0:
        return np.zeros(0, dtype=int)
    order = np.argsort(-harm, kind="stable")
    order = order[harm[order] > 0]
    enough = int(np.searchsorted(np.cumsum(harm[order]), excess)) + 1
    return order[:enough]
