"""The cards of what is pushed: front matter for the Hub, and what is known, in Markdown. Nothing is written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import yaml

from tsae.base.provenance import version_of
from tsae.report.markdown import markdown_cell, markdown_table
from tsae.report.text import count, listed, percent
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE
from tsae.sae.quality.evaluation import Evaluation
from tsae.sae.quality.stability import Stability

SAELENS_FOLDER = "saelens"
_TAGS = ("tsae", "sparse-autoencoder", "mechanistic-interpretability")
_CITATION = """```bibtex
@article{bhalla2025temporal,
  title   = {Temporal Sparse Autoencoders: Leveraging the Sequential Nature of Language for Interpretability},
  author  = {Bhalla, Usha and Oesterling, Alex and Verdun, Claudio Mayrink and Lakkaraju, Himabindu and
             Calmon, Flavio P.},
  journal = {arXiv preprint arXiv:2511.05541},
  year    = {2025}
}
```
"""
_SLICES = ["by", "value", "n_tokens", "fve", "fve_high", "cosine", "l0", "alive"]


def model_card(
    repo: str,
    sae: TemporalSAE,
    *,
    licence: str,
    base_model: str | None,
    rollouts: Rollouts | None,
    evaluation: Evaluation | None,
    stability: Stability | None,
    others: Sequence[str],
) -> str:
    """The README of the model's repository.

    Args:
        repo: its name.
        sae: that is pushed.
        licence: the Hub's name of it.
        base_model: the Hub's name of the model that was read, where it is known.
        rollouts: what was read, where it is known.
        evaluation: on held-out problems, where there is one.
        stability: over seeds, where it was measured.
        others: sentences on what else is pushed.
    """
    front = {
        "license": licence,
        "library_name": "tsae",
        "tags": [*_TAGS, "temporal-sae", "saelens"],
        **({} if base_model is None else {"base_model": base_model}),
    }
    config, read = sae.config, f"`{base_model}`" if base_model else "a model"
    parts = [
        _front(front),
        f"# {repo.rpartition('/')[2]}\n",
        f"A temporal sparse autoencoder ([arXiv 2511.05541](https://arxiv.org/abs/2511.05541)) of {read} and of what "
        f"training with verifiable rewards made of it, at `{sae.site}`: {config.d_sae:,} latents on {sae.d_model:,} "
        f"dimensions, of which the first {config.d_high:,} are high-level and change slowly from token to token. About "
        f"{config.k} are active a token. It takes activations as they are.\n",
        *(f"{sentence}\n" for sentence in others),
        "## Load\n",
        f'```python\nimport tsae\n\nsae = tsae.load_sae("{repo}")\n'
        f"codes = sae.encode(x)  # (n, {sae.d_model}) activations of {sae.site}\n```\n",
        f'```python\nfrom sae_lens import SAE\n\nsae = SAE.from_pretrained("{repo}", "{SAELENS_FOLDER}")  # the same '
        "codes, bit for bit\n```\n",
        f"`tsae run RUN --sae {repo}` analyses a training with it, and `tsae train --init-from {repo}` trains it on.\n",
        "## Data\n",
        _facts(_data(sae, rollouts)),
        "## Measured\n",
        _measured(evaluation),
        "## Limits\n",
        "".join(f"- {sentence}\n" for sentence in _limits(sae, evaluation, stability)),
        "## Licence\n",
        f"{licence}, as its makers say. The model that was read, and the data, have licences of their own.\n",
        "## Citation\n",
        _CITATION,
        _made(),
    ]
    return "\n".join(parts)


def dataset_card(repo: str, model: str, *, licence: str, tables: Sequence[str], rollouts: Rollouts | None) -> str:
    """The README of the data set's repository; `tables` are Parquet files of the diff, which the Hub shows."""
    configs = [{"config_name": name, "data_files": f"diff/{name}.parquet"} for name in tables]
    front = {"license": licence, "tags": list(_TAGS), **({"configs": configs} if configs else {})}
    text = f"Codes of the SAE [{model}](https://huggingface.co/{model}) and what changed between checkpoints.\n"
    load = (
        "```python\nfrom huggingface_hub import snapshot_download\n\nimport tsae\n\n"
        f'folder = snapshot_download("{repo}", repo_type="dataset")\n'
        'diff = tsae.FeatureDiff.load(f"{folder}/diff", features=tsae.FeatureTable.load(f"{folder}/features"))\n```\n'
    )
    known = [] if rollouts is None else [_facts(_of_rollouts(rollouts))]
    held = "`features/rollouts.parquet` holds the prompts and responses that were read.\n"
    return "\n".join([_front(front), f"# {repo.rpartition('/')[2]}\n", text, held, *known, "## Load\n", load, _made()])


def space_card(repo: str, model: str, *, licence: str) -> str:
    """The README of the Space's repository."""
    front = {"title": repo.rpartition("/")[2], "sdk": "static", "app_file": "index.html", "license": licence}
    return "\n".join(
        [_front(front), f"What training changed, by [{model}](https://huggingface.co/{model}).\n", _made()]
    )


def _front(content: Mapping[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True)}---\n"


def _made() -> str:
    return f"Written by tsae {version_of('tsae')} from what it knows of these files.\n"


def _facts(facts: Mapping[str, object]) -> str:
    return markdown_table(pd.DataFrame([(name, str(value)) for name, value in facts.items()], columns=["what", "is"]))


def _of_rollouts(rollouts: Rollouts) -> dict[str, object]:
    return {
        "trajectories": f"{len(rollouts):,} of {rollouts.n_problems:,} problems",
        "sampled by": listed(rollouts.policies),
    }


def _data(sae: TemporalSAE, rollouts: Rollouts | None) -> dict[str, object]:
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
    return found


def _measured(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "Not evaluated.\n"
    table = evaluation.table()
    rest = (
        f"{evaluation.n_tokens:,} tokens of {evaluation.n_trajectories:,} trajectories. Smoothness of the high-level "
        f"latents {evaluation.smoothness_high:.3f} (the paper's measure), {evaluation.smoothness_high_robust:.3f} "
        "(robust); lower is smoother. FVE is the fraction of variance explained, L0 the number of active latents a "
        "token.\n"
    )
    return f"{markdown_table(table[_SLICES])}\n{rest}"


def _limits(sae: TemporalSAE, evaluation: Evaluation | None, stability: Stability | None) -> list[str]:
    found = ["It was trained on rollouts, not on general text: elsewhere it explains less. tsae warns where it does."]
    if evaluation is None:
        found.append("Nothing was measured on problems that training left out.")
    else:
        readers = [part for part in evaluation.slices if part.by == "reader"]
        if readers:
            worst = min(readers, key=lambda part: part.fve)
            found.append(
                f"It explains least of reader {markdown_cell(worst.value)}: {percent(worst.fve)} % of the variance."
            )
        silent = percent(1 - evaluation.alive)
        found.append(f"{silent} % of its latents fired on none of the {evaluation.n_tokens:,} tokens measured.")
    if sae.norm_limit is not None:
        found.append(
            "Tokens beyond the norm limit, such as attention sinks, get no codes in tsae; SAELens encodes them."
        )
    if stability is None:
        found.append("One seed: how many latents other seeds find again was not measured.")
    else:
        share = percent(stability.summary()["found_again"])
        found.append(f"Other seeds find {share} % of its latents again ({count(len(stability.cosine), 'other seed')}).")
    found.append("Latents have no names. What one stands for is a hypothesis until it was tested causally.")
    return found
