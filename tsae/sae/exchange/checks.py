"""What files of SAEs must hold before anything is computed with them: values of configs, weights, shapes, sites."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tsae.errors import TsaeError

_AGAIN = "Fetch it again."
_MOST = sys.float_info.max
_SITE = re.compile(r"[\w.\[\]-]{1,200}")
_SHAPES = {
    "W_enc": ("d_model", "d_sae"), "W_dec": ("d_sae", "d_model"), "b_dec": ("d_model",), "b_enc": ("d_sae",),
    "r_mag": ("d_sae",), "b_gate": ("d_sae",), "b_mag": ("d_sae",), "threshold": ("d_sae",),
    "topk_threshold": ("d_sae",),
}  # fmt: skip
_MAY_BE_ONE = ("threshold", "topk_threshold")
"""One number for all latents, too."""


def shown(value: Any) -> str:
    """A value of a file, short enough for a message."""
    text = repr(value.tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def whole(value: Any, name: str, where: str | Path, *, least: int = 1, fix: str = _AGAIN) -> int:
    """A whole number, or a tensor of one. Nothing is rounded or read from text."""
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, int) or found < least:
        raise _other(value, name, f"a whole number of at least {least}", where, fix)
    return found


def number(value: Any, name: str, where: str | Path, *, positive: bool = False, fix: str = _AGAIN) -> float:
    """A finite number, or a tensor of one."""
    found = _plain(value)
    known = isinstance(found, int | float) and not isinstance(found, bool) and abs(found) <= _MOST
    if not known or (positive and found <= 0):
        raise _other(value, name, f"a finite number{' above 0' if positive else ''}", where, fix)
    return float(found)


def flag(value: Any, name: str, where: str | Path) -> bool:
    """True or false, and nothing that only counts as one."""
    if not isinstance(value, bool):
        raise _other(value, name, "true or false", where)
    return value


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _other(value: Any, name: str, expected: str, where: str | Path, fix: str = _AGAIN) -> TsaeError:
    return TsaeError(f"{name} is {shown(value)}, expected {expected}", where=where, fix=fix)


def as_weights(
    found: Mapping[str, Any], where: str | Path, fix: str = _AGAIN, *, infinite: Iterable[str] = ("threshold",)
) -> dict[str, torch.Tensor]:
    """Weights as float32.

    Args:
        found: by name.
        where: named in messages.
        fix: what to do about others.
        infinite: names that may hold +inf, such as the threshold of a latent that is never active.

    Raises:
        TsaeError: where one is no tensor of real floating-point numbers, or some of its values are not finite.
    """
    weights = {}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise TsaeError(f"{name[:60]} holds {kind}, expected floating-point numbers", where=where, fix=fix)
        weights[name] = value.float()
        finite = weights[name].isfinite()
        if name in infinite:
            finite |= weights[name] == torch.inf
        if not bool(finite.all()):
            raise TsaeError(f"{name[:60]} holds values that are no finite numbers", where=where, fix=fix)
    return weights


def check_shapes(weights: Mapping[str, torch.Tensor], d_model: int, d_sae: int, needed: Iterable[str] = ()) -> None:
    """Check shapes before anything of such a size is made, or torch stretches one to another.

    Raises:
        ValueError: where a weight has another shape, is needed and missing, or the SAE is empty.
    """
    sizes = {"d_model": d_model, "d_sae": d_sae}
    if min(sizes.values()) < 1:
        raise ValueError(f"d_model is {d_model} and d_sae {d_sae}")
    for name in needed:
        if name not in weights:
            raise ValueError(f"it has no {name}")
    for name, axes in _SHAPES.items():
        expected = tuple(sizes[axis] for axis in axes)
        if name not in weights or weights[name].shape == expected:
            continue
        if name not in _MAY_BE_ONE or weights[name].shape not in ((), (1,)):
            raise ValueError(f"{name} has shape {tuple(weights[name].shape)}, expected {expected}")


@contextmanager
def not_fitting(weights: str, config: str, folder: str | Path, fix: str) -> Iterator[None]:
    """Turn an error of torch into a TsaeError: the weights do not fit the config."""
    try:
        yield
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError, OverflowError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[-1].strip()[:200]
        raise TsaeError(f"{weights} does not fit {config} ({reason})", where=folder, fix=fix) from error


def check_site(site: Any, where: str | Path) -> str:
    """The name of a site, which is printed and compared from here on. It may be the name of any module."""
    if not isinstance(site, str) or _SITE.fullmatch(site) is None:
        what = f"names the site {shown(site)}, expected a name such as blocks.14.hook_resid_post"
        raise TsaeError(what, where=where, fix="Correct that name, or save the SAE again.")
    return site


def check_residual(site: Any, where: str | Path) -> str:
    """The name of a site. One of TransformerLens must be in the residual stream between blocks."""
    name = check_site(site, where)
    if "hook_" in name and re.fullmatch(r"blocks\.\d+\.hook_resid_(pre|post)", name) is None:
        raise TsaeError(
            f"reads {name}; activations are captured between blocks only",
            where=where,
            fix="Use an SAE of the residual stream (blocks.{L}.hook_resid_post or hook_resid_pre).",
        )
    return name
