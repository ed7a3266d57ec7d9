"""Stability: which latents another training finds again, by the cosine of matched decoder directions.

Latents of two dictionaries are matched one to one so that the sum of their cosines is largest (the assignment problem,
as Paulo & Belrose do, arXiv 2501.16615), regardless of group. A latent that no other seed has need not be an artefact,
and one that all have need not mean anything; but a finding about a latent that does not come back is a finding about
one dictionary.

Dead latents keep a random direction and match nothing; judge stability over those that are active.

`tsae evaluate --seeds` writes stability.json beside the SAE, `encode` takes it along, and the diff shows it. It names
its SAE by fingerprint: beside other weights, such as those of a later training in the same folder, it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import reduce

from tsae.base import display
from tsae.base.artefact import add_to_artefact, is_whole, read_record, write_record
from tsae.base.files import as_path, reading
from tsae.errors import TsaeError, refuse
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    import pandas as pd

FILE = "stability.json"
FOUND_AGAIN = 0.7
"""Cosine from which Paulo & Belrose call a latent shared."""


@dataclass(frozen=True)
class Stability:
    """Stability of one SAE's latents: how well other SAEs match them."""

    sae: str
    """Fingerprint of the SAE."""
    others: tuple[str, ...]
    """Names of the SAEs that it was compared with."""
    cosine: np.ndarray
    """(n_others, d_sae) cosine with the matched latent of each; NaN where the other is narrower and has none left."""
    same_group: np.ndarray
    """(n_others, d_sae) bool: the matched latent is in the same group (high- or low-level)."""
    d_high: int

    @property
    def per_latent(self) -> np.ndarray:
        """(d_sae,) mean cosine over the others; a missing match counts as 0."""
        return reduce(np.nan_to_num(self.cosine), "other latent -> latent", "mean")

    def table(self) -> pd.DataFrame:
        """One row a latent, indexed by feature: group, stability (mean matched cosine), lowest, same_group (share)."""
        import pandas as pd

        latents = np.arange(self.cosine.shape[1])
        cosine = np.nan_to_num(self.cosine)
        return pd.DataFrame(
            {
                "group": np.where(latents < self.d_high, "high", "low"),
                "stability": self.per_latent,
                "lowest": reduce(cosine, "other latent -> latent", "min"),
                "same_group": reduce(self.same_group.astype(float), "other latent -> latent", "mean"),
            },
            index=pd.RangeIndex(len(latents), name="feature"),
        )

    def summary(self, alive: np.ndarray | None = None) -> dict[str, float]:
        """Mean cosine, share found again (cosine of at least .7) and share matched within the group.

        Args:
            alive: (d_sae,) bool, the latents that count; all by default.
        """
        kept = np.ones(self.cosine.shape[1], dtype=bool) if alive is None else alive
        cosine = np.nan_to_num(self.cosine)[:, kept]
        return {
            "n_others": len(self.others),
            "n_latents": int(kept.sum()),
            "cosine": float(cosine.mean()),
            "found_again": float((cosine >= FOUND_AGAIN).mean()),
            "same_group": float(self.same_group[:, kept].mean()),
        }

    def _repr_html_(self) -> str:
        s, table = self.summary(), self.table().reset_index()
        facts = {
            "other SAEs": int(s["n_others"]),
            "mean matched cosine": s["cosine"],
            f"found again (cosine ≥ {FOUND_AGAIN:g})": f"{s['found_again']:.1%}",
            "matched within their group": f"{s['same_group']:.1%}",
        }
        return display.card("Stability", facts, ("least stable latents", table.sort_values("stability", kind="stable")))

    def __str__(self) -> str:
        s = self.summary()
        return (
            f"stability over {s['n_others']} other SAEs: mean matched cosine {s['cosine']:.3f}, "
            f"{s['found_again']:.1%} of latents found again (cosine >= {FOUND_AGAIN}), "
            f"{s['same_group']:.1%} matched within their group"
        )

    def save(self, folder: str | Path) -> Path:
        """Write stability.json into the SAE's folder.

        Raises:
            TsaeError: where another file of the folder is damaged or missing: nothing is added to what is not whole.
        """
        folder = as_path(folder)
        return add_to_artefact(folder, FILE, self.write) if is_whole(folder) else self.write(folder / FILE)

    def write(self, file: Path) -> Path:
        """Write the file alone."""
        content = {
            "sae": self.sae,
            "others": list(self.others),
            "d_high": self.d_high,
            "matching": "one to one, largest sum of decoder cosines",
            "summary": self.summary(),
            "cosine": [[None if np.isnan(c) else round(float(c), 4) for c in row] for row in self.cosine],
            "same_group": self.same_group.astype(int).tolist(),
        }
        return write_record(file, content)

    @classmethod
    def load(cls, folder: str | Path) -> Stability:
        """Read what `save` wrote; cosines to four places.

        Raises:
            TsaeError: where there is none, or the file is damaged.
        """
        file = as_path(folder) / FILE
        refuse(folder, (not file.is_file(), f"holds no {FILE}", "Make it with `tsae evaluate --seeds`."))
        fix = "Make it anew with `tsae evaluate --seeds`, or remove it."
        content = read_record(file, fix)
        with reading(file, fix):
            return cls(
                sae=content["sae"],
                others=tuple(content["others"]),
                cosine=np.array(content["cosine"], dtype=float),
                same_group=np.array(content["same_group"], dtype=bool),
                d_high=content["d_high"],
            )

    @classmethod
    def beside(cls, folder: str | Path, sae: str | None) -> Stability | None:
        """Load it from the folder of an SAE of this fingerprint, or of its features; None where there is none."""
        return cls.load(folder).of(sae, folder) if (as_path(folder) / FILE).is_file() else None

    def of(self, sae: str | None, where: str | Path) -> Stability:
        """Return this stability, after a check that it belongs to the SAE of this fingerprint.

        Raises:
            TsaeError: where it belongs to another SAE.
        """
        what = f"the stability in {FILE} is that of the SAE {self.sae}, not of {sae}"
        refuse(where, (self.sae != sae, what, f"Make it anew with `tsae evaluate --seeds`, or delete {FILE}."))
        return self


def stability(sae: TemporalSAE | str | Path, others: Sequence[TemporalSAE | str | Path]) -> Stability:
    """Match the latents of an SAE with those of others, such as the same training with other seeds.

    Args:
        sae: or its folder.
        others: or their folders; of the same d_model, of any width.

    Raises:
        TsaeError: where there are none, or they read activations of another width or site.
    """
    refuse("stability", (not others, "no other SAE to compare with", "Train one with another seed."))
    mine = TemporalSAE.of(sae)
    names, cosines, groups = [], [], []
    seen = {mine.fingerprint}
    for number, item in enumerate(others):
        other = TemporalSAE.of(item)
        name = str(item) if isinstance(item, (str, Path)) else f"SAE {number + 1}"
        if (other.d_model, other.site) != (mine.d_model, mine.site):
            what = f"reads {other.site} of d_model {other.d_model}, not {mine.site} of d_model {mine.d_model}"
            raise TsaeError(what, where=name, fix="Compare SAEs of the same activations.")
        if other.fingerprint in seen:
            raise TsaeError("is this SAE, or another that is compared already", where=name, fix="Give other seeds.")
        seen.add(other.fingerprint)
        cosine, match = matched_cosines(mine.W_dec.detach(), other.W_dec.detach())
        same = (match < other.config.d_high) == (np.arange(mine.config.d_sae) < mine.config.d_high)
        names.append(name)
        cosines.append(cosine)
        groups.append(same & (match >= 0))
    return Stability(mine.fingerprint, tuple(names), np.array(cosines), np.array(groups), mine.config.d_high)


def matched_cosines(mine: torch.Tensor, others: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Match directions one to one.

    Args:
        mine: (n, d_model).
        others: (m, d_model).

    Returns:
        ((n,) cosine with the match, (n,) its index); NaN and −1 where m < n and none is left. The cosine matrix of
        n · m floats is held. The assignment takes 1 to 3 seconds at 4,096 latents, and up to the cube of the width.
    """
    from scipy.optimize import linear_sum_assignment

    units = [rows.float() / rows.float().norm(dim=1, keepdim=True).clamp_min(1e-12) for rows in (mine, others)]
    table = (units[0] @ units[1].T).cpu().numpy()
    rows, columns = linear_sum_assignment(table, maximize=True)
    cosine, match = np.full(len(table), np.nan), np.full(len(table), -1)
    cosine[rows], match[rows] = table[rows, columns], columns
    return cosine, match
