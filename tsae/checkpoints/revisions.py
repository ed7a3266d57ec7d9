"""Revisions of a Hugging Face repository as checkpoints of a run: branches and tags, or commits, that name a step."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from tsae.base.files import as_tsae_error
from tsae.errors import TsaeError

COMMITS = "commits"
"""In the place of a revision: the commits whose titles name a step, as the trainers of transformers push them."""
_STEP = re.compile(
    r"(?:^|[^a-z])(?:global[-_ ]?step|step|checkpoint|iter|update)s?[-_ :=]*(\d{1,18})(?!\d)", re.IGNORECASE
)


def several(revision: str | None) -> bool:
    """Whether a revision stands for several."""
    return revision is not None and (revision == COMMITS or "*" in revision)


def steps_of(repository: str, revision: str) -> list[tuple[int, str]]:
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
        if (match := _STEP.search(name)) is None:
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
