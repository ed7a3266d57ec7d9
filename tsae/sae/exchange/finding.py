"""Where an SAE lies: a folder or file here, a repository of the Hugging Face Hub, a release that sae_lens knows.

| name | what is read |
|---|---|
| saes/l14 | the folder or file of this path |
| org/name | the top of the Hub's repository, if there is no such path here |
| org/name/folder, org/name/layer14.sae.pt | a folder or file in it |
| org/name/folder@revision | a branch, tag or commit of it |
| saelens:RELEASE/ID | an SAE of sae_lens's list, such as saelens:gpt2-small-res-jb/blocks.8.hook_resid_pre |

From the Hub only the files of that one SAE are fetched, with huggingface_hub: its cache, its token, HF_ENDPOINT and
HF_HUB_OFFLINE hold.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

from tsae.base.files import as_path, as_tsae_error, reading
from tsae.errors import TsaeError
from tsae.sae.exchange.published import read_published
from tsae.sae.exchange.saelens_files import FoundSAE, from_lens, is_saelens, load_folder

SAELENS = "saelens:"
_ON_HUB = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:/([^@]+?))?/?(?:@([^@/][^@]*))?")
_FILES = (
    "config.json", "training.json", "sae.safetensors", "manifest.json", "metrics.jsonl", "stability.json",
    "evaluation.json", "cfg.json", "sae_weights.safetensors", "params.npz", "params.safetensors", "ae.pt",
    "hyperparams.json", "checkpoints/final.safetensors",
)  # fmt: skip
"""Of one SAE, in any of the formats."""


def find_foreign(where: str | Path, site: str | None) -> tuple[Path, FoundSAE | None]:
    """The local path of an SAE, and its content where tsae did not write it.

    Args:
        where: see the top of the module.
        site: TransformerLens name, in place of the one that the files of a published SAE say.

    Raises:
        TsaeError: where it cannot be reached, is damaged, or cannot be computed here.
    """
    if str(where).startswith(SAELENS):
        return as_path(where), _registered(str(where), site)
    path = located(where)
    found = read_published(path, site)
    if found is None and is_saelens(path):
        with reading(path, "Save it again."):
            found = load_folder(path, site)
    return path, found


def located(where: str | Path) -> Path:
    """The path here; what lies on the Hub is fetched.

    Raises:
        TsaeError: where there is neither such a path nor such a repository, or it cannot be reached.
    """
    path, match = as_path(where), _ON_HUB.fullmatch(as_path(where).as_posix())
    try:
        if path.exists() or match is None or Path(path.parts[0]).exists():
            return path
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise TsaeError(f"is not a path ({why})", where=str(where)[:200], fix="Check the path or the name.") from error
    from huggingface_hub import snapshot_download

    repository, below, revision = match.groups()
    within = f"{below}/" if below else ""
    wanted = [below] if below and Path(below).suffix in (".pt", ".pth") else [within + name for name in _FILES]
    fix = "Check the path or the name (org/name/folder@revision); a private repository needs a token (hf auth login)."
    with as_tsae_error("is not a path here, and cannot be fetched from the Hub", str(where)[:200], fix):
        root = Path(snapshot_download(repository, revision=revision, allow_patterns=wanted))
    if not any((root / name).is_file() for name in wanted):
        raise TsaeError(
            f"the repository has no SAE there{_elsewhere(repository, revision)}", where=where, fix="Name its folder."
        )
    return root / below if below else root


def _elsewhere(repository: str, revision: str | None) -> str:
    """Where in a repository SAEs lie, for a message."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(repository, revision=revision)
    except Exception:  # transports and servers' answers
        return ""
    places = {name.rpartition("/")[0] for name in names if Path(name).name in _FILES and "/" in name}
    places |= {name for name in names if name.endswith(".sae.pt")}
    some = sorted(place.removesuffix("/checkpoints") for place in places)
    return f"; SAEs lie in {', '.join(some[:3])}{', …' if len(some) > 3 else ''}" if some else ""


def _registered(name: str, site: str | None) -> FoundSAE:
    """An SAE of sae_lens's list, loaded by sae_lens with the factors that the list knows."""
    from sae_lens import SAE
    from sae_lens.loading.pretrained_saes_directory import get_pretrained_saes_directory

    release, _, id = name.removeprefix(SAELENS).partition("/")
    known = get_pretrained_saes_directory().get(release)
    if known is None or id not in known.saes_map:
        has = "no such release" if known is None else f"{release} with {', '.join(list(known.saes_map)[:3])}, …"
        raise TsaeError(
            f"sae_lens's list has {has}", where=name[:200], fix="Give saelens:RELEASE/ID as its list names them."
        )
    with as_tsae_error("cannot be loaded by sae_lens", name, "Check the network."), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lens = SAE.from_pretrained(release, id)
    config: dict[str, Any] = lens.cfg.to_dict()
    promised = {"l0": known.expected_l0.get(id) or None, "fve": known.expected_var_explained.get(id, 1.0)}
    if promised["fve"] == 1.0:  # what sae_lens has where nothing is known
        del promised["fve"]
    more = {"promised": {key: float(value) for key, value in promised.items() if value}, "format": "sae_lens"}
    config["metadata"] = {**config["metadata"], **more, "saelens": name.removeprefix(SAELENS)}
    with reading(name, "Check the network."):
        return from_lens(config, {n: v.detach() for n, v in lens.state_dict().items()}, name, site)
