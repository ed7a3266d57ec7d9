"""Sites: places in the residual stream, by their TransformerLens names. Light, so that a name is checked at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tsae.errors import TsaeError, refuse

_SITE = re.compile(r"blocks\.(\d+)\.hook_resid_(pre|post)")


@dataclass(frozen=True)
class Site:
    """A place in the residual stream."""

    layer: int
    """Block index, from 0."""
    point: str
    """"pre" or "post"."""

    @property
    def name(self) -> str:
        return f"blocks.{self.layer}.hook_resid_{self.point}"

    @classmethod
    def parse(cls, name: str) -> Site:
        """Read a TransformerLens name. Raises TsaeError for any other name."""
        match = _SITE.fullmatch(name)
        if match is None:
            fix = "Use blocks.{L}.hook_resid_post or blocks.{L}.hook_resid_pre, such as blocks.14.hook_resid_post."
            raise TsaeError(f"unknown site {name!r}", where="sites", fix=fix)
        return cls(layer=int(match[1]), point=match[2])


def check_sites(sites: Sequence[str], n_layers: int, where: str) -> list[Site]:
    """Parse site names and check that the model has these blocks."""
    parsed = [Site.parse(name) for name in sites]
    beyond = next((site.name for site in parsed if site.layer >= n_layers), None)
    what = f"{beyond} does not exist: the model has blocks 0 to {n_layers - 1}" if beyond else "no sites given"
    refuse(where, (beyond or not parsed, what, "Choose a block that the model has, such as blocks.1.hook_resid_post."))
    return parsed
