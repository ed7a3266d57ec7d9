"""Layouts: how trainers name the folders of a run's checkpoints, and where in such a folder the model lies.

A *step folder* has the step in its name and a model in it, at one of a few places. A trainer's own code says which
(`_NAMES` and `_PLACES` name the trainers); numbered folders of other trainers are found by the general rule. What is
in a folder decides, never the trainer's name.

Of a Hugging Face repository, branches and tags, or commits, that name a step are its checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from tsae.base.files import as_tsae_error
from tsae.checkpoints.fsdp import fsdp_shards
from tsae.errors import TsaeError

_NAMES = (
    # transformers, TRL, ms-swift (below v0-20250101-120000/)
    r"checkpoint-(\d{1,18})",
    # verl global_step_50; OpenRLHF global_step50_hf, and global_step50 of DeepSpeed
    r"global_?step_?(\d{1,18})(?:[-_]hf)?",
    # open-instruct, prime-rl, NeMo-RL: step_50; and others' iter_0000050, iter_0000050_hf, update-3, ba50 (Composer)
    r"(?:step|iter|iteration|update|ckpt|checkpoint|ba)[-_]?(\d{1,18})(?:[-_]hf)?",
    # AReaL; slime's rollout_49; torchtune's epoch_0
    r"epoch\d+epochstep\d+globalstep(\d{1,18})",
    r"(?:rollout|epoch)[-_]?(\d{1,18})",
    # MODEL-step-50, as people name what they keep: MODEL is the run
    r".+[-_](?:step|checkpoint|ckpt)[-_]?(\d{1,18})(?:[-_]hf)?",
    # ART, PipelineRL: 0001
    r"(\d{1,18})",
)
"""By what a step folder is called; the first pattern that fits a folder of a run is that of the run."""
_STEP = [re.compile(name) for name in _NAMES]
_FROM_ZERO = (3, 4)
"""Patterns of names that count from 0 what is done when the folder is written: their step is one more."""
_NAMED, _BARE = len(_NAMES) - 2, len(_NAMES) - 1
"""The pattern with the run's name in it, and that of a number alone; the model is directly in such a folder. Runs may
be numbered, too, so a number alone is a step only in a folder of one of these names."""
_OF_STEPS = ("checkpoints", "intermediate", "hf")
_NOT_THE_POLICY = ("critic", "_critic", "critic_train", "reward_model", "broadcasts")
"""Folders beside a run's checkpoints with models that are not the trained policy (OpenRLHF, AReaL, ROLL), or what
prime-rl sends to its inference servers."""

_PLACES = (
    "",
    # verl: whole weights where its settings save hf_model, adapters always
    "actor/huggingface", "actor/hf_model", "merged_hf_model", "actor/lora_adapter", "actor",
    # NeMo-RL
    "policy/weights/model/consolidated", "policy/weights/consolidated", "policy/weights/model", "policy/weights",
    "policy",
    # ROLL; others
    "actor_train", "hf", "huggingface", "hf_model", "model", "consolidated", "weights",
)  # fmt: skip
"""Where in a step folder a model may lie, the most complete first."""

_SHARDS = {
    "model_world_size_*_rank_*.pt": "FSDP shards",
    "*.distcp": "a distributed checkpoint of torch",
    "*_model_states.pt": "ZeRO shards of DeepSpeed",
}
_MERGE = {
    "FSDP shards": "python -m verl.model_merger merge --backend fsdp --local_dir {shards} "
    "--target_dir {shards}/huggingface",
    "a distributed checkpoint of torch": "examples/converters/convert_dcp_to_hf.py --config {step}/config.yaml "
    "--dcp-ckpt-path {shards} --hf-ckpt-path {step}/hf of NeMo-RL, or tools/convert_torch_dist_to_hf.py --input-dir "
    "{shards} --output-dir {step}/hf of slime; other trainers have such a script of their own",
    # DeepSpeed writes the script beside the folder of the shards, which it calls a tag.
    "ZeRO shards of DeepSpeed": "python {above}/zero_to_fp32.py {above} {step}/hf -t {tag} --safe_serialization "
    "(OpenRLHF: train with --save_hf_ckpt)",
}
"""The trainer's own command that makes whole weights of shards."""
_DEEPEST = 6
"""Folders between the given one and a run's, such as checkpoints/USER/EXPERIMENT/TRIAL/default of AReaL."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.safetensors.index.json")


class StepFolder(NamedTuple):
    """A checkpoint of a run."""

    run: Path
    """The folder that holds the run's step folders; see `_run_of`."""
    step: int
    model: Path
    """Where its model lies, complete or not."""
    shards: str | None
    """How its weights are stored, where that cannot be read as it is."""


def step_of(path: Path) -> tuple[int, Path] | None:
    """The step and the run of a folder with a model, from the names above it; None where no name has a step."""
    for place in _PLACES:
        parts = Path(place).parts
        if path.parts[len(path.parts) - len(parts) :] == parts:
            folder = Path(*path.parts[: len(path.parts) - len(parts)])
            number = _number(folder.name)
            if number and (number[0] < _NAMED or (not place and _is_named_step(folder, number[0]))):
                return number[1], _run_of(folder, number[0])
    return None


def step_folders(path: Path) -> list[StepFolder]:
    """The checkpoints of the run, or the runs, in a folder: resolved, by run and step. Or the folder's own model."""
    path = path.resolve()
    if (number := _number(path.name)) and number[0] < _NAMED:
        if has_weights(path):  # beside it may lie shards of the same model
            return []
        if not _is_model(path) and _holds(path):
            return [_model_in(path.parent, number[1], path)]
    runs = {run.resolve(): run for run in _runs(path, _DEEPEST)}  # a run that a link names, too, is one
    return sorted(found for run in runs for found in _of_run(run))


def refuse_shards(path: Path, folders: list[StepFolder]) -> None:
    """Refuse a run whose weights all lie in shards.

    Raises:
        TsaeError: with the trainer's command that merges them.
    """
    whole = {folder.step for folder in folders if folder.shards is None}
    if folders and not whole:
        last = folders[-1]
        where = next(sub for sub in (last.model, *last.model.rglob("*")) if sub.is_dir() and _shards(sub))
        kind = last.shards or ""
        command = _MERGE[kind].format(shards=where, above=where.parent, tag=where.name, step=last.model)
        what = f"holds {len(folders)} checkpoints, all as {kind}, which are not read"
        raise TsaeError(what, where=path, fix=f"Merge them, this one by: {command}")


def _number(name: str) -> tuple[int, int] | None:
    """Which pattern a folder's name has, and the step in it."""
    for rank, pattern in enumerate(_STEP):
        if match := pattern.fullmatch(name):
            return rank, int(match[1]) + (rank in _FROM_ZERO)
    return None


def _is_named_step(folder: Path, rank: int) -> bool:
    return rank == _NAMED or (rank == _BARE and folder.parent.name in _OF_STEPS)


def _run_of(folder: Path, rank: int) -> Path:
    """The folder that holds a run's step folders; where their names have the run's, one of that name in it."""
    name = re.sub(r"[-_](?:step|checkpoint|ckpt)[-_]?\d+(?:[-_]hf)?$", "", folder.name)
    return folder.parent / name if rank == _NAMED else folder.parent


def _subfolders(path: Path) -> list[Path]:
    return [
        sub
        for sub in path.iterdir()
        if sub.is_dir() and not sub.name.startswith(".") and sub.name not in _NOT_THE_POLICY
    ]


def _runs(path: Path, deepest: int) -> Iterator[Path]:
    """Folders with step folders in them. What is below a step folder is its own."""
    yield path
    if deepest:
        for sub in sorted(_subfolders(path)):
            if _number(sub.name) is None or not _is_checkpoint(sub):
                yield from _runs(sub, deepest - 1)


def named_otherwise(run: Path) -> list[str]:
    """Checkpoints beside the step folders of a run that are left out, since their names count something else.

    A run of checkpoint-N may hold an epoch_M, too, which is one of its steps again.
    """
    numbered = _numbered(run)
    return sorted(sub.name for (rank, _), sub in numbered if rank > min(rank for (rank, _), _ in numbered))


def _numbered(run: Path) -> list[tuple[tuple[int, int], Path]]:
    return [(number, sub) for sub in _subfolders(run) if (number := _number(sub.name)) and _is_checkpoint(sub)]


def _of_run(run: Path) -> list[StepFolder]:
    numbered = _numbered(run)
    first = min((rank for (rank, _), _ in numbered), default=0)
    found = [_model_in(_run_of(sub, rank), step, sub) for (rank, step), sub in numbered if rank == first]
    whole = {folder[:2] for folder in found if folder.shards is None}
    return [folder for folder in found if folder.shards is None or folder[:2] not in whole]


def _is_checkpoint(folder: Path) -> bool:
    """Whether a numbered folder is a checkpoint; one of transformers is even before anything is written into it."""
    number = _number(folder.name)
    if number is not None and number[0] >= _NAMED:
        return _is_named_step(folder, number[0]) and _is_model(folder)
    return number is not None and (number[0] == 0 or _holds(folder))


def has_weights(folder: Path) -> bool:
    """Whether a folder holds a model or an adapter with weights, complete or not."""
    return _is_model(folder) and any(any(folder.glob(pattern)) for pattern in _WEIGHTS)


def _holds(folder: Path) -> bool:
    return any(_is_model(folder / place) or _shards(folder / place) for place in _PLACES)


def _model_in(run: Path, step: int, folder: Path) -> StepFolder:
    models = [folder / place for place in _PLACES if _is_model(folder / place)]
    for model in models:
        if has_weights(model):
            return StepFolder(run, step, model, None)
    if fsdp_shards(folder / "actor"):
        return StepFolder(run, step, folder / "actor", None)
    shards = next((kind for place in _PLACES if (kind := _shards(folder / place))), None)
    return StepFolder(run, step, folder if shards or not models else models[0], shards)


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file()


def _shards(folder: Path) -> str | None:
    return next((kind for pattern, kind in _SHARDS.items() if any(folder.glob(pattern))), None)


COMMITS = "commits"
"""In the place of a revision: the commits whose titles name a step, as the trainers of transformers push them."""
_STEP_NAMED = re.compile(
    r"(?:^|[^a-z])(?:global[-_ ]?step|step|checkpoint|iter|update)s?[-_ :=]*(\d{1,18})(?!\d)", re.IGNORECASE
)


def several_revisions(revision: str | None) -> bool:
    """Whether a revision stands for several."""
    return revision is not None and (revision == COMMITS or "*" in revision)


def revisions_of(repository: str, revision: str) -> list[tuple[int, str]]:
    """The steps of a repository and their revisions, in order. Asks the Hub for names alone.

    Args:
        repository: such as org/model.
        revision: "commits", or a pattern of names of branches and tags, such as step_*.

    Raises:
        TsaeError: where the Hub cannot be asked, nothing fits that names a step, or two names have one step.
    """
    from huggingface_hub import HfApi

    where = f"{repository}@{revision}"
    with as_tsae_error("the Hub does not list its revisions", where, "Check the name, and the network."):
        if revision == COMMITS:
            named = [(commit.title, commit.commit_id) for commit in HfApi().list_repo_commits(repository)]
        else:
            refs = HfApi().list_repo_refs(repository)
            names = sorted({ref.name for ref in (*refs.branches, *refs.tags)})
            named = [(name, name) for name in names if fnmatchcase(name, revision)]
    found: dict[int, str] = {}
    for name, known in named:
        if (match := _STEP_NAMED.search(name)) is None:
            continue
        if (step := int(match[1])) in found and revision != COMMITS:  # of commits the last one, which comes first
            what = f"{found[step]} and {known} are both of step {step}"
            raise TsaeError(what, where=where, fix="Give a narrower pattern, or one revision after another.")
        found.setdefault(step, known)
    if not found:
        shown = ", ".join(name for name, _ in named[:8]) or "none"
        what = f"no {'commit' if revision == COMMITS else 'branch or tag'} names a step; there are: {shown}"
        raise TsaeError(what, where=where, fix="Name the revisions one by one: org/model@revision.")
    return sorted(found.items())
