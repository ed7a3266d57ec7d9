"""`intervene`: what chosen features do, by changing them while a checkpoint generates.

One set of problems is answered under every condition with the same random numbers:

1. none: the model as it is; and no_op, with hooks that encode and change nothing, which has to give the same tokens;
2. features: the edit of the chosen features;
3. random_1 … random_n: the same edit of features matched on firing rate and magnitude; "random" pools them;
4. same_norm_1 … same_norm_n: every token moves exactly as far as under 2, along the decoder rows of those random
   features, as matching is never perfect; "same_norm" pools them. A transplant, in which two models run, has 4 at most;
5. wrong_sign: every token moves by as much the other way;
6. mean_difference, where a direction is given: every token moves as far as under 2, along that direction.

A transplant sets features to what another checkpoint, the donor, computes for them while it reads the same tokens. It
has three more conditions, which say how much there is to move:

7. donor: the donor answers itself;
8. whole: the donor's whole residual stream at the site, without the SAE: the most that any of its features can move;
9. all_features: all features at once, which leaves out what the SAE does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tsae.activations.reading_plan import check_tokenizer
from tsae.base.artefact import versions
from tsae.base.filters import feature_number, need_features
from tsae.base.progress import progress_bar
from tsae.causal.config import InterventionConfig
from tsae.causal.controls import FeatureScales, matched_features, overlap
from tsae.causal.edits import Donor, FeatureEdit, Rewriting
from tsae.causal.intervention import Intervention, outcome_table
from tsae.checkpoints.bridge import TransformerLensReader
from tsae.checkpoints.hooks import decoder_blocks, rewritten
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.sites import check_sites
from tsae.errors import TsaeError, refuse
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.behaviours import with_behaviours
from tsae.rollouts.problems import Problem
from tsae.rollouts.sampling import sample
from tsae.rollouts.table import Rollouts
from tsae.sae.model import TemporalSAE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_DIRECTIONS = 4
"""Random directions of the same norm that a transplant has at most."""


def intervene(
    checkpoint: Checkpoint,
    sae: TemporalSAE | str | Path,
    features: FeatureTable | str | Path,
    chosen: Sequence[int],
    config: InterventionConfig | None = None,
    *,
    problems: Rollouts | Sequence[Problem] | None = None,
    verify: Callable[[str, str], bool] | None = None,
    direction: torch.Tensor | None = None,
    donor: Checkpoint | None = None,
    exclude: Sequence[int] = (),
    describe: Callable[[Rollouts], Rollouts] | None = None,
    progress: bool = True,
) -> Intervention:
    """Change features during generation, and measure what that does beside what controls do.

    Args:
        checkpoint: generates.
        sae: or its folder; the one that `features` was encoded with.
        features: or its folder: says how often and how strongly features fire, for units and controls.
        chosen: feature indices, changed together.
        config: defaults of `InterventionConfig`.
        problems: to answer; those of a Rollouts table with their bands, by default the one of `features`. Problems on
            which the features were not chosen are the fairer test.
        verify: (response text, reference answer) -> right or not; without it accuracy is not measured.
        direction: (d_model,) for the condition mean_difference; see `tsae.causal.controls.mean_difference`.
        donor: whose features are transplanted (mode "transplant"), such as the run's last checkpoint where the base
            generates. Both models are held at once.
        exclude: features that are not drawn as random ones, such as others of the same family.
        describe: adds further behaviours (columns named in ``info["behaviours"]``) to those that are read off the
            texts, such as `tsae.testbed.annotate.with_behaviours`.
        progress: show bars.

    Raises:
        TsaeError: where features are out of range, come twice or never fire; the SAE is not the table's, or does not
            fit the checkpoint's width, blocks or tokenizer; or the problems are of another tokenizer.
    """
    config = config or InterventionConfig()
    features = FeatureTable.of(features)
    device = config.sampling.device
    sae = TemporalSAE.of(sae, device=device)
    features.need_sae(sae.fingerprint, sae.config.d_sae)
    chosen = tuple(feature_number(feature, features.n_features, "features") for feature in chosen)
    need_features(exclude, features.n_features, "features")
    scales = FeatureScales.of(features, checkpoint.id, config.tokens)
    silent = next((feature for feature in chosen if not scales.typical[feature] > 0), None)
    unknown = f"feature {silent} fires on no response token of the table, so that its typical activation is unknown"
    what = "gives no checkpoint whose features are transplanted" if donor is None else "transplants nothing"
    odd = (donor is None) == (config.mode == "transplant")
    refuse(
        "intervene",
        (odd, f"mode={config.mode!r} {what}", 'donor goes with mode="transplant".'),
        (not chosen, "no features chosen", "Give at least one."),
        (len(set(chosen)) < len(chosen), "a feature comes twice", "Give every feature once."),
        (silent is not None, unknown, "Leave it out."),
    )
    model, rewriting = _load(checkpoint, config)
    check_model(model, sae, checkpoint, features)
    asked, bands = _problems(features.rollouts if problems is None else problems, checkpoint)
    given = None
    if donor is not None:
        given = Donor(donor.load_model(device=device), sae.site)
        check_model(given.model, sae, donor, features)
    seed = config.sampling.seed
    sets = matched_features(chosen, scales, sae, config.n_random, seed, exclude=exclude)

    directions = sets if given is None else sets[:_DIRECTIONS]

    def edit(ids: tuple[int, ...], **changes: Any) -> FeatureEdit:
        return FeatureEdit(sae, ids, config.mode, levels(ids, scales, config), donor=given, **changes)

    main = edit(chosen)
    conditions: dict[str, FeatureEdit | None] = {
        "none": None,
        "no_op": replace(main, sign=0.0),
        "features": main,
        **({} if given is None else {"all_features": edit((*range(sae.config.d_sae),)), "whole": edit((), whole=True)}),
        **{f"random_{i}": edit(ids) for i, ids in enumerate(sets, 1)},
        **{f"same_norm_{i}": replace(main, direction=_summed(ids, scales, sae)) for i, ids in enumerate(directions, 1)},
        "wrong_sign": main.reversed(),
    }
    if direction is not None:
        conditions["mean_difference"] = replace(main, direction=_unit(direction, sae).to(device))
    special = tuple(features.info["special_ids"])
    runs = [
        (name, checkpoint, model, None if change is None else change.hook(rewriting, config.tokens, special))
        for name, change in conditions.items()
    ]
    if donor is not None and given is not None:
        runs.append(("donor", donor, given.model, None))
    parts = []
    n_responses = len(asked) * config.sampling.n_samples
    named = f"{config.mode} {'in' if donor is None else f'{donor.id} into'} {checkpoint.id}"
    with progress_bar(named, "response", n_responses * len(runs), shown=progress) as bar:
        for name, who, loaded, around in runs:
            drawn = sample(who, asked, config.sampling, verify=verify, model=loaded, around=around, progress=False)
            parts.append(drawn.with_column("policy", [name] * len(drawn)))
            bar.update(len(drawn))
    rollouts = Rollouts.concat(parts)
    if bands:
        rollouts = rollouts.with_column("band", [bands.get(id) for id in rollouts.table["problem_id"].to_pylist()])
    rollouts = with_behaviours(rollouts if describe is None else describe(rollouts), reference="none")
    same = parts[0].table["response_ids"].to_pylist() == parts[1].table["response_ids"].to_pylist()
    edited = rollouts.where(policy="features")
    n_tokens = int(edited.lengths("response_ids").sum())
    known = {problem.ids for problem in features.rollouts.problems()}  # by the token ids of their prompts
    quality = [reader["fve"] for reader in features.info["readers"] if reader["id"] == checkpoint.id]
    return Intervention(
        outcomes=outcome_table(rollouts, confidence=config.confidence, shared=overlap(sets)),
        rollouts=rollouts,
        info={
            "checkpoint": checkpoint.id,
            **({} if donor is None else {"donor": donor.id}),
            "features": list(chosen),
            "config": asdict(config),
            "sae": features.info["sae"],
            "fve": quality[0] if quality else None,
            "n_problems": len(asked),
            "rows": {"problems": edited.n_problems, "trajectories": len(edited), "tokens": n_tokens},
            "no_op_identical": same,
            "random": [list(ids) for ids in sets],
            "matching": _matching(chosen, sets, scales),
            "features_encoded_with": features.rollouts.fingerprint,
            "n_of_features": sum(problem.ids in known for problem in parts[0].problems()),
            "versions": versions(),
        },
    )


def check_model(model: PreTrainedModel, sae: TemporalSAE, checkpoint: Checkpoint, features: FeatureTable) -> None:
    """Refuse a model that the SAE or the table's tokens do not fit."""
    check_sites([sae.site], model.config.get_text_config().num_hidden_layers, checkpoint.path)
    width = model.config.get_text_config().hidden_size
    if width != sae.d_model:
        what = f"has d_model {width}, the SAE expects {sae.d_model}"
        raise TsaeError(what, where=checkpoint.path, fix="Use an SAE trained on this model.")
    features.need_weights(checkpoint)
    check_tokenizer(checkpoint, features.rollouts)


def _problems(given: Rollouts | Sequence[Problem], checkpoint: Checkpoint) -> tuple[list[Problem], dict[str, str]]:
    """The problems, each once, and their bands. Those of a table have the token ids that it has."""
    if not isinstance(given, Rollouts):
        return list(given), {}
    check_tokenizer(checkpoint, given)
    banded = given.frame[given.frame.band.notna()]
    return given.problems(), dict(zip(banded.problem_id, banded.band, strict=True))


def _load(
    checkpoint: Checkpoint, config: InterventionConfig
) -> tuple[PreTrainedModel, Callable[[PreTrainedModel], Rewriting]]:
    """The model, and how its residual stream is rewritten."""
    device = config.sampling.device
    if config.backend == "huggingface":
        model = checkpoint.load_model(device=device)
        decoder_blocks(model)
        return model, lambda model: partial(rewritten, model)
    reader = TransformerLensReader(checkpoint, ["blocks.0.hook_resid_post"], device=device)
    return reader.model, lambda _model: reader.rewritten


def levels(ids: tuple[int, ...], scales: FeatureScales, config: InterventionConfig) -> tuple[float, ...]:
    """The levels of a `FeatureEdit` of these features."""
    if config.mode in ("ablate", "transplant"):
        return (0.0,) * len(ids)
    if config.mode == "mean":
        return tuple(scales.mean[list(ids)].tolist())
    return tuple((config.amount * scales.typical[list(ids)]).tolist())


def _summed(ids: tuple[int, ...], scales: FeatureScales, sae: TemporalSAE) -> torch.Tensor:
    """(d_model,) unit vector: the features' decoder rows, each as long as the feature is typically active."""
    rows = sae.W_dec.detach()[list(ids)]
    return torch.nn.functional.normalize(rows.new_tensor(scales.typical[list(ids)]) @ rows, dim=0)


def _unit(direction: torch.Tensor, sae: TemporalSAE) -> torch.Tensor:
    if direction.shape != (sae.d_model,) or not torch.isfinite(direction).all() or not direction.norm() > 0:
        raise TsaeError(
            f"the direction has shape {tuple(direction.shape)} and norm {float(direction.norm()):.3g}, expected "
            f"({sae.d_model},) and a finite norm above 0",
            where="intervene",
        )
    return direction.float() / direction.float().norm()


def _matching(chosen: tuple[int, ...], sets: list[tuple[int, ...]], scales: FeatureScales) -> dict[str, Any]:
    """How alike the random features are: sums over a set, the chosen set's and each random one's; and the share of
    features that two random sets have in common."""

    def total(values: np.ndarray) -> dict[str, Any]:
        return {"features": float(values[list(chosen)].sum()), "random": [float(values[list(s)].sum()) for s in sets]}

    return {
        "rate": total(scales.rate),
        "typical": total(scales.typical),
        "shared": overlap(sets),
        "n_tokens": scales.n_tokens,
        "own": scales.own,
    }
