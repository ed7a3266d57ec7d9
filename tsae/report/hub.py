"""Push an SAE, with its card, to the Hugging Face Hub; for a whole run also its features and its page.

| repository | holds |
|---|---|
| model NAME | README.md, what `tsae train` writes, evaluation.json, stability.json, and saelens/ for sae_lens |
| data set NAME-features | README.md, features/, diff/ |
| Space NAME-report | README.md, index.html: the page |

1. Everything is written into a folder of its own, or into none (`prepare`).
2. Each repository gets one commit (`upload`). Other files in it stay.

huggingface_hub does the talking, with its own token (HF_TOKEN, or hf auth login), which is neither read nor
kept here."""

from __future__ import annotations

import filecmp
import math
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jinja2
import pandas as pd
import yaml

from tsae.base.artefact import MANIFEST, Kind, add_to_artefact, read_manifest, read_record, version_of
from tsae.base.files import as_path, partial_name, read_object, reading, write_text, writing
from tsae.base.output_lock import output_lock
from tsae.diff.feature_diff import DIFF, FeatureDiff
from tsae.errors import TsaeError, first_line, public, refuse, without_secrets
from tsae.features.feature_table import FEATURES, FeatureTable
from tsae.report.text import count, listed, markdown_cell, markdown_table, percent
from tsae.rollouts.table import Rollouts
from tsae.sae.config import PushConfig
from tsae.sae.model import ForeignSAE, TemporalSAE
from tsae.sae.quality.evaluation import Evaluation
from tsae.sae.quality.stability import Stability

_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_BASE = re.compile(r"(?:[\w-][\w.-]*/)?[\w-][\w.-]*")
_LICENCE = re.compile(r"[\w.+-]{1,100}")
_AGAIN = "Make it again."


class Repository(NamedTuple):
    """One repository to be, and the folder of its files."""

    kind: str
    """model, dataset or space, as huggingface_hub calls them."""
    name: str
    folder: Path

    def __str__(self) -> str:
        files = [file for file in self.folder.rglob("*") if file.is_file()]
        size = sum(file.stat().st_size for file in files) / 1e6
        return f"{self.kind} {self.name}: {len(files)} files, {size:,.1f} MB"


def push(repo: str, source: str | Path, config: PushConfig | None = None) -> list[str]:
    """Push to the Hub without asking; arguments, result and errors are those of `prepare` and `upload`."""
    config = config or PushConfig()
    with TemporaryDirectory(prefix="tsae-push-") as folder:
        return upload(prepare(repo, source, Path(folder) / "files", config), private=config.private)


def prepare(repo: str, source: str | Path, to: str | Path, config: PushConfig | None = None) -> list[Repository]:
    """Write exactly what would be pushed.

    Args:
        repo: org/name on the Hub.
        source: folder of an SAE that `tsae train` wrote, or of a whole run (`tsae run`, `tsae demo`).
        to: a folder that is empty or is not there; a complete one appears, or none. One that holds just this is left.
        config: defaults of `PushConfig`, but for the licence, which must be given.

    Returns:
        the repositories, in the order in which they are pushed; their folders are below `to`.

    Raises:
        TsaeError: where no licence is given, the Hub cannot have the name, the SAE is not one of tsae's, something
            that was asked for is not there, or the folder holds something else.
    """
    config, source, to = config or PushConfig(), as_path(source), Path(os.path.abspath(as_path(to)))
    refuse(to, (not to.name, "is not a folder that can be made", "Give another --to-folder."))
    refuse("push", (_NAME.fullmatch(repo) is None, f"{repo!r} is not a repository's name", "Give org/name."))
    fix = "Choose one by its name on the Hub (--licence apache-2.0); --licence unknown says that there is none."
    refuse(source, (not config.licence, "has no licence, without which nobody may use it", fix))
    for name, value, known in (("licence", config.licence, _LICENCE), ("base_model", config.base_model, _BASE)):
        unknown = value is not None and known.fullmatch(value) is None
        refuse("push", (unknown, f"{name}={value!r} is not a name that the Hub knows", "Give another name."))
    run = next((file for name in ("run.json", "demo.json") if _is_run(file := source / name)), None)
    wanted = [write for asked, write in ((config.dataset, _dataset), (config.space, _space)) if asked]
    refuse(source, (wanted and not run, "is not a run, which has features and a page", "Give a run's folder."))
    partial = partial_name(to)
    with output_lock(to), writing(to, "Make room, or give another --to-folder."):
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        try:
            found = [_model(repo, source if run is None else source / "sae", run, config, partial)]
            found += [write(repo, source, config, partial) for write in wanted]
            _into_place(partial, to)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return [one._replace(folder=to / one.folder.relative_to(partial)) for one in found]


def upload(repositories: Sequence[Repository], *, private: bool = False) -> list[str]:
    """Push prepared repositories: one commit each.

    Args:
        repositories: of `prepare`.
        private: make new ones private.

    Returns:
        the address of each commit.

    Raises:
        TsaeError: where there is no token, or the Hub refuses; it says what has been pushed by then.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

    api, done = HfApi(), []
    for one in repositories:
        files = sorted(file for file in one.folder.rglob("*") if file.is_file())
        added = [CommitOperationAdd(file.relative_to(one.folder).as_posix(), file) for file in files]
        try:
            sdk = "static" if one.kind == "space" else None
            # Nothing is created where nobody is logged in.
            api.create_repo(one.name, repo_type=one.kind, private=private, exist_ok=True, space_sdk=sdk)
            commit = api.create_commit(one.name, added, commit_message="Push from tsae", repo_type=one.kind)
            done.append(commit.commit_url)
        except (OSError, HTTPError, ValueError, RuntimeError, LookupError) as error:
            kept = f" (pushed already: {', '.join(r.name for r in repositories[: len(done)])})" if done else ""
            fix = "See that the Hub can be reached, and log in with a token that may write there (hf auth login, or "
            fix += "HF_TOKEN); then try again."
            what = f"cannot be pushed ({without_secrets(first_line(error))}){kept}"
            raise TsaeError(what, where=f"{one.kind} {one.name}", fix=fix) from error
    return done


def _is_run(stamp: Path) -> bool:
    """Whether this is a run's record, and no folder that happens to hold a file of its name."""
    return stamp.is_file() and (stamp.parent / "sae").is_dir()


def _model(repo: str, source: Path, run: Path | None, config: PushConfig, to: Path) -> Repository:
    sae = TemporalSAE.load(source)
    foreign = isinstance(sae, ForeignSAE) or "sae_lens" in sae.training_info
    refuse(source, (foreign, "was not trained by tsae; its makers have published it", "Name that instead."))
    evaluation = _evaluation(run, config)
    if evaluation is not None:
        what = f"the evaluation is that of the SAE {evaluation.sae}, not of {sae.fingerprint}"
        refuse(source, (evaluation.sae not in (None, sae.fingerprint), what, _AGAIN))
    sae.training_info = _told(sae, evaluation)
    stability = Stability.beside(source, sae.fingerprint)
    if stability is not None:
        n, d_sae = stability.cosine.shape[1], sae.config.d_sae
        refuse(source, (n != d_sae, f"the stability is of {n} latents, and the SAE has {d_sae}", _AGAIN))
        stability = replace(stability, others=tuple(Path(other).name for other in stability.others))
    folder = to / "model"
    sae.save(folder)
    sae.to_saelens(folder / SAELENS_FOLDER)
    if evaluation is not None:
        add_to_artefact(folder, "evaluation.json", evaluation.save)
    if stability is not None:
        stability.save(folder)
    base_model = config.base_model or (None if run is None else _base_of(run))
    rollouts = _rollouts(run)
    front = {
        "license": config.licence,
        "library_name": "tsae",
        "tags": [*_TAGS, "temporal-sae", "saelens"],
        **({} if base_model is None else {"base_model": base_model}),
    }
    readers = [] if evaluation is None else [part for part in evaluation.slices if part.by == "reader"]
    worst = min(readers, key=lambda part: part.fve, default=None)
    with reading(source / "training.json", "Train it again."):
        _write_card(
            folder, "model", repo, front, sae=sae, base_model=base_model, dataset=config.dataset, space=config.space,
            data=_data(sae, rollouts), evaluation=evaluation, stability=stability, worst=worst,
            worst_reader="" if worst is None else markdown_cell(worst.value), licence=config.licence,
            slices="" if evaluation is None else markdown_table(evaluation.table()[_SLICES]),
        )  # fmt: skip
    return Repository("model", repo, folder)


def _told(sae: TemporalSAE, evaluation: Evaluation | None) -> dict[str, object]:
    """What is known of a training, without what is only its owner's: keys, passwords, and where its log went."""
    told = public(sae.training_info)
    if isinstance(told.get("training"), dict):
        told["training"]["log_to"] = None
    if evaluation is not None:
        # What `check_published_fve` holds it to, where others use it.
        measured = {"fve": evaluation.fve, "l0": evaluation.l0}
        told["promised"] = {name: value for name, value in measured.items() if math.isfinite(value)}
    return dict(told)


def _dataset(repo: str, source: Path, config: PushConfig, to: Path) -> Repository:
    folder, name = to / "dataset", f"{repo}-features"
    # Loaded, so that nothing damaged is pushed.
    features, sae = FeatureTable.load(source / "features"), TemporalSAE.load(source / "sae").fingerprint
    FeatureDiff.load(source / "diff", features=features)
    own = features.info["sae"].get("weights")
    what = f"holds the codes of the SAE {own}, and {sae} is pushed"
    refuse(source / "features", (own != sae, what, "Encode again."))
    for part, kind in (("features", FEATURES), ("diff", DIFF)):
        _copy_artefact(source / part, kind, folder / part)
    tables = sorted(file.stem for file in (folder / "diff").glob("*.parquet"))
    configs = [{"config_name": table, "data_files": f"diff/{table}.parquet"} for table in tables]
    front = {"license": config.licence, "tags": list(_TAGS), **({"configs": configs} if configs else {})}
    data = _facts(_of_rollouts(Rollouts.read(folder / "features" / "rollouts.parquet")))
    _write_card(folder, "dataset", name, front, model=repo, data=data)
    return Repository("dataset", name, folder)


def _copy_artefact(source: Path, kind: Kind, to: Path) -> None:
    """Copy the files that a manifest names, and no others. A link could lead to what nobody meant to publish."""
    files = read_manifest(source, kind)["files"]
    to.mkdir(parents=True)
    for name in (*files, MANIFEST):
        _copy(source / name, to / name)


def _copy(file: Path, to: Path) -> None:
    what = "is a link, and what it leads to is not published"
    refuse(file, (file.is_symlink(), what, "Put the file itself here."))
    shutil.copyfile(file, to)


def _space(repo: str, source: Path, config: PushConfig, to: Path) -> Repository:
    folder, name, page = to / "space", f"{repo}-report", source / "report.html"
    refuse(page, (not page.is_file(), "is not there", "Write it with tsae report, or run the analysis again."))
    folder.mkdir(parents=True)
    _copy(page, folder / "index.html")
    front = {"title": name.rpartition("/")[2], "sdk": "static", "app_file": "index.html", "license": config.licence}
    _write_card(folder, "space", name, front, model=repo)
    return Repository("space", name, folder)


def _evaluation(run: Path | None, config: PushConfig) -> Evaluation | None:
    file = None if config.evaluation is None else as_path(config.evaluation)
    if file is None:
        file = None if run is None else run.parent / "evaluation" / "evaluation.json"
        if file is None or not file.is_file():
            return None
        evaluation = Evaluation.load(file)
    else:
        with reading(file, _AGAIN):
            evaluation = Evaluation.from_dict(read_object(file, _AGAIN).get("evaluation", {}))
    with reading(file, _AGAIN):
        for part in (evaluation, *evaluation.slices):
            for name, value in vars(part).items():
                number = type(value) in (int, float) and not math.isinf(value)
                if not number and value is not None and name not in ("by", "value", "sae", "slices", "losses"):
                    raise ValueError(f"{name}={value!r} is not a finite number")
        if not evaluation.slices:
            raise ValueError("it measures nothing")
        return evaluation


def _base_of(run: Path) -> str | None:
    """The Hub's name of a run's base; no path of this machine."""
    with reading(run, _AGAIN):
        series = read_record(run, _AGAIN).get("series") or [[None, ""]]
        _, name = map(str, series[0])
    return name if _NAME.fullmatch(name) and not Path(name).exists() else None


def _rollouts(run: Path | None) -> Rollouts | None:
    places = () if run is None else ("rollouts/rollouts.parquet", "rollouts.parquet")
    file = next((run.parent / place for place in places if run is not None and (run.parent / place).is_file()), None)
    return None if file is None else Rollouts.read(file)


def _into_place(partial: Path, to: Path) -> None:
    if to.is_dir() and any(to.iterdir()):
        if _same(partial, to):
            return
        raise TsaeError("is not empty, and holds something else", where=to, fix="Give another --to-folder.")
    is_file = to.exists() and not to.is_dir()
    refuse(to, (is_file, "is a file, and a folder is to be written", "Give another --to-folder."))
    if to.exists():
        to.rmdir()
    partial.rename(to)


def _same(one: Path, other: Path) -> bool:
    names = [{file.relative_to(top) for file in top.rglob("*") if file.is_file()} for top in (one, other)]
    return names[0] == names[1] and all(filecmp.cmp(one / name, other / name, shallow=False) for name in names[0])


SAELENS_FOLDER = "saelens"
_TAGS = ("tsae", "sparse-autoencoder", "mechanistic-interpretability")
_SLICES = ["by", "value", "n_tokens", "fve", "fve_high", "cosine", "l0", "alive"]


def _write_card(folder: Path, kind: str, repo: str, front: Mapping[str, Any], **facts: Any) -> None:
    """Write README.md: front matter for the Hub, and what is known, in Markdown (templates/hub)."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tsae.report", "templates/hub"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    card = environment.get_template(f"{kind}.md").render(
        front=yaml.safe_dump(dict(front), sort_keys=False, allow_unicode=True), repo=repo,
        name=repo.rpartition("/")[2], version=version_of("tsae"), saelens=SAELENS_FOLDER, count=count, percent=percent,
        thousands="{:,}".format, **facts,
    )  # fmt: skip
    write_text(folder / "README.md", card)


def _facts(facts: Mapping[str, object]) -> str:
    return markdown_table(pd.DataFrame([(name, str(value)) for name, value in facts.items()], columns=["what", "is"]))


def _of_rollouts(rollouts: Rollouts) -> dict[str, object]:
    return {
        "trajectories": f"{len(rollouts):,} of {rollouts.n_problems:,} problems",
        "sampled by": listed(rollouts.policies),
    }


def _data(sae: TemporalSAE, rollouts: Rollouts | None) -> str:
    info = sae.training_info
    training, norms = info.get("training", {}), info.get("norms", {})
    found: dict[str, object] = {} if rollouts is None else _of_rollouts(rollouts)
    found["read by"] = listed(info.get("store", {}).get("readers", [])) or "not known"
    if "tokens" in training:
        found["trained on"] = f"{training['tokens']:,} tokens in batches of {training['batch_tokens']:,}"
        found["tokens in the store"] = (
            f"{info['tokens_in_store']:,}, span {training['span']}, every tenth problem left out"
        )
        found["balanced over"] = listed(training["balance"]) or "nothing"
        found["seed"] = training["seed"]
    if "limit" in norms:
        found["left out"] = (
            f"tokens of a norm about the centre above {norms['limit']:.3g} ({percent(norms['outlier_share'])} %)"
        )
    if "start" in info:
        found["started from"] = f"an SAE with the fingerprint {info['start']}"
    found["fingerprint"] = sae.fingerprint
    return _facts(found)
