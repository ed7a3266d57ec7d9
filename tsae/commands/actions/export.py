"""`tsae export` and `tsae push`."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import tsae
from tsae.base.disk.made_by import made_by, record_early
from tsae.base.files import new_folder
from tsae.checkpoints.hooks import site_names
from tsae.commands.common import say_wrote
from tsae.commands.options.export import Export, Push
from tsae.errors import TsaeError
from tsae.features.exchange.delphi_cache import write_delphi
from tsae.features.exchange.neuronpedia import Neuronpedia, write_neuronpedia
from tsae.features.feature_table import FeatureTable
from tsae.report.hub.push import prepare, upload
from tsae.sae.model import TemporalSAE
from tsae.sae.steering import SteeringVector

_OURS = re.compile(
    r"cfg\.json|sae_weights\.safetensors|feature-\d+\.(safetensors|gguf)|"  # sae_lens, steering vectors
    r"layers\.\d+/(config\.json|\d+_\d+\.safetensors)|"  # delphi, below the hook point
    r"[^/]+/[^/]+/(features|activations|explanations)/batch-\d+\.jsonl\.gz"  # Neuronpedia, below model and source
)
"""What exports write, in any of their forms."""


def run_export(options: Export) -> None:
    sae = TemporalSAE.load(options.sae, site=options.site)
    features = None if options.features is None else FeatureTable.load(options.features)
    if features is not None:
        features.need_sae(sae.fingerprint, sae.config.d_sae)
    options = replace(options, choose=tuple(dict.fromkeys(options.choose)))
    with new_folder(options.to, replace=_exported(options.to)) as folder:
        told = _written(options, sae, features, folder)
        record_early(options.to)
    say_wrote(options.to, told)


def _exported(to: Path) -> bool:
    """Whether a folder is an export, which may be replaced.

    Raises:
        TsaeError: where somebody has put something else into it.
    """
    before = made_by(to)
    if before is None or before.words[:1] != ("export",):
        return False
    inside = {path.relative_to(to).as_posix(): path for path in sorted(to.rglob("*"))}
    own = {name for name, path in inside.items() if not path.is_symlink() and (path.is_dir() or _OURS.fullmatch(name))}
    if strange := [name for name in inside if name not in own]:
        what = f"is an export, and holds {strange[0]}, which no export wrote"
        raise TsaeError(what, where=to, fix="Move that away, or give another folder.")
    return True


def _written(options: Export, sae: TemporalSAE, features: FeatureTable | None, folder: Path) -> str:
    """Write into the folder; what it is."""
    if strange := [feature for feature in options.choose if not 0 <= feature < sae.config.d_sae]:
        there = f"there are 0 to {sae.config.d_sae - 1}"
        raise TsaeError(f"no feature {strange[0]}; {there}", where="--choose")
    if options.format == "saelens":
        sae.to_saelens(folder, architecture=options.architecture)
        return f"{sae} as {options.architecture}"
    if options.format in ("safetensors", "gguf"):
        if not options.choose:
            raise TsaeError("no features are named", where="tsae export", fix="Name them with --choose.")
        for feature in options.choose:
            vector = SteeringVector.of(sae, feature, _typical(features, feature))
            file = folder / f"feature-{feature}.{options.format}"
            if options.format == "gguf":
                vector.to_gguf(file, options.model)
            else:
                vector.save(file)
        scale = "of unit activation" if features is None else "scaled to the features' typical activation"
        return f"{len(options.choose)} steering vectors at {sae.site}, {scale}"
    missing = [name for name, given in (("--features", features), ("--model", options.model)) if not given]
    if options.format == "neuronpedia" and not options.creator:
        missing.append("--creator")
    if missing or features is None:
        where = f"tsae export --format {options.format}"
        raise TsaeError(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing", where=where)
    if options.format == "delphi":
        hookpoint = site_names(sae.site).get("delphi")
        if hookpoint is None:
            raise TsaeError(f"delphi has no hook point for {sae.site}", where=options.sae)
        write_delphi(
            features, folder, hookpoint=hookpoint, model_name=options.model, reader=options.reader,
            context=options.context,
        )  # fmt: skip
        return f"activations of {features.n_features:,} features at {hookpoint}"
    diff = None if options.diff is None else tsae.FeatureDiff.load(options.diff, features=features)
    found = None if options.explanations is None else tsae.Explanations.load(options.explanations)
    if found is not None and found.info["sae"] != sae.fingerprint:
        raise TsaeError("labels features of another SAE", where=options.explanations, fix="Explain this one's.")
    names = Neuronpedia(options.model, options.source, options.creator)
    write_neuronpedia(
        features, sae, folder, names, {} if diff is None else diff.info.get("token_strings", {}),
        chosen=options.choose, described=None if diff is None else diff.features,
        labels=None if found is None else found.labels, labeller="" if found is None else found.info["labeller"],
    )  # fmt: skip
    return f"{len(options.choose) or features.n_features:,} features as {options.model}/{options.source}"


def _typical(features: FeatureTable | None, feature: int) -> float:
    """Mean activation of a feature where it is active in responses; 1 without features or where it never is."""
    if features is None:
        return 1.0
    tokens, values = features.column(feature)
    values = values[features.span_mask("response")[tokens]]
    return float(np.mean(values)) if len(values) else 1.0


def run_push(options: Push) -> None:
    if options.to_folder is not None:
        for one in prepare(options.repo, options.source, options.to_folder, options.config):
            say_wrote(one.folder, one)
        return
    with TemporaryDirectory(prefix="tsae-push-") as folder:
        found = prepare(options.repo, options.source, Path(folder) / "files", options.config)
        for one in found:
            print(one)
        if not options.yes and not _agreed(options):
            print("nothing was pushed")
            return
        for address in upload(found, private=options.config.private):
            print(f"pushed {address}")


def _agreed(options: Push) -> bool:
    from huggingface_hub import constants

    if not sys.stdin.isatty():
        raise TsaeError(
            "nobody is there to be asked, and nothing was pushed",
            where="tsae push",
            fix="Look at it with --to-folder, then push with --yes.",
        )
    seen = "for you and your organisation" if options.config.private else "for everybody to see"
    return input(f"Push this to {constants.ENDPOINT}, {seen}? [y/N] ").strip().lower() in ("y", "yes")
