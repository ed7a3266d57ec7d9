"""Credit and a curriculum in TRL's GRPOTrainer, with as few overrides as possible.

`_generate_and_score_completions` returns advantages (B,); `_compute_loss` also takes (B, T). `FeatureGRPOTrainer`
overrides the first: it calls TRL's own, and a rule replaces the advantages. Loss, generation, rewards and logs stay
TRL's. `_calculate_rewards` refuses rewards that are not finite. A curriculum learns from the one reward that says what
is right (`CurriculumConfig.outcome`), never from their sum, and overrides `_get_train_sampler`. tests/rl/test_trl.py
holds the contract with TRL, and fails if a release changes it.

    from tsae.rl.trl import FeatureCredit, FeatureGRPOTrainer

    credit = FeatureCredit(series.base, "saes/l14", "credit/", ShapingConfig(plausibility=True))
    trainer = FeatureGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(...), credit=credit)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from trl import GRPOConfig, GRPOTrainer

from tsae.base.usual_state import usual_state
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError, refuse
from tsae.rl.config import ShapingConfig
from tsae.rl.credit import Credit, open_reference, shape_advantages
from tsae.rl.curriculum import Curriculum, CurriculumSampler
from tsae.rollouts.rewards import outcome_reward
from tsae.sae.model import TemporalSAE

LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo")
"""Losses whose advantages may be per token: sums of ratio times advantage over tokens."""


class AdvantageRule(Protocol):
    """Computes advantages per token of a batch."""

    def __call__(self, rows: Sequence[dict[str, Any]], batch: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
        """(B, T) advantages.

        Args:
            rows: (B,) rows of the training data set.
            batch: prompt_ids, prompt_mask (B, P), padded on the left; completion_ids, completion_mask (B, T), padded on
                the right; advantages (B,); with tools, tool_mask (B, T), 0 for tokens that these wrote.
            group_size: responses per problem; groups follow one another.
        """
        ...


class FeatureCredit:
    """The rule of `tsae.rl.credit`, with scores from the features of a frozen reference.

    Args:
        reference: the checkpoint that credit was learned on.
        sae: the SAE, or its folder.
        credit: the credit, or its folder.
        shaping: defaults of `ShapingConfig`.
        applies: chooses rows of the training data for credit, such as problems of the kind that it was learned on. The
            others keep TRL's advantages. By default all rows.
        device: torch device with room for the reference beside the policy.

    Raises:
        TsaeError: where credit, SAE and reference do not belong together.
    """

    @usual_state()
    def __init__(
        self,
        reference: Checkpoint,
        sae: TemporalSAE | str | Path,
        credit: Credit | str | Path,
        shaping: ShapingConfig | None = None,
        *,
        applies: Callable[[dict[str, Any]], bool] | None = None,
        device: str = "cpu",
    ) -> None:
        self.applies = applies
        self.sae = TemporalSAE.of(sae, device=device)
        self.credit = credit if isinstance(credit, Credit) else Credit.load(credit)
        self.shaping = shaping or ShapingConfig()
        trained_on = self.credit.info["sae"]
        if self.sae.fingerprint != trained_on["weights"]:
            raise TsaeError(
                f"the credit was learned on features of the SAE {trained_on['weights']} at {trained_on['site']}, "
                f"this one is {self.sae.fingerprint} at {self.sae.site}",
                where="FeatureCredit",
                fix="Give the SAE that the features were encoded with, or learn credit on features of this one.",
            )
        self.reader = open_reference(reference, self.sae.site, self.sae.d_model, device=device)

    @usual_state()
    @torch.no_grad()
    def scores(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """(B, T) scores of the completions' tokens times 1 − the reference's probability of each
        (`Credit.token_credit`)."""
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        start = batch["prompt_ids"].shape[1] - 1
        # Codes of one row at a time are slow, of all rows at once could be gigabytes.
        at_once = max(1, 2**27 // (ids.shape[1] * self.credit.d_sae * 4))
        found = []
        for low in range(0, len(ids), at_once):
            part = slice(low, low + at_once)
            read, predicted = self.reader.read_and_predict(ids[part], mask[part])
            x = read[self.sae.site][:, start:].float()
            codes = self.sae.encode(x).masked_fill(self.sae.outliers(x)[..., None], 0)  # as in a FeatureTable
            written = batch["completion_ids"][part].to(codes.device)
            found.append(self.credit.token_credit(codes, written, predicted.logprob[:, start + 1 :].to(codes.device)))
        return torch.cat(found).to(batch["completion_ids"].device)

    def __call__(self, rows: Sequence[dict[str, Any]], batch: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
        advantages = batch["advantages"]
        group = torch.arange(len(advantages), device=advantages.device) // group_size
        # What a tool wrote between the policy's turns earns no credit.
        sampled = batch["completion_mask"] * batch.get("tool_mask", 1)
        shaped = shape_advantages(self.scores(batch), advantages, sampled, group, self.shaping)
        if self.applies is None:
            return shaped
        mine = torch.tensor([self.applies(row) for row in rows], device=advantages.device)
        return torch.where(mine.unsqueeze(1), shaped, advantages.unsqueeze(1) * sampled)


class FeatureMixin:
    """For a class derived from GRPOTrainer; put it first among the bases."""

    def __init__(
        self, *args: Any, credit: AdvantageRule | None = None, curriculum: Curriculum | None = None, **kwargs: Any
    ) -> None:
        self._credit, self._curriculum = credit, curriculum
        super().__init__(*args, **kwargs)
        check_arguments(self.args, self.processing_class, self._credit)  # type: ignore[attr-defined]
        if curriculum is not None:
            curriculum.check(self.train_dataset)  # type: ignore[attr-defined]
            self._outcome = _outcome_of(self.reward_func_names, curriculum)  # type: ignore[attr-defined]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if not self.model.training:  # type: ignore[attr-defined]
            return output
        if self._curriculum is not None:
            # From all processes, so that their samplers stay the same.
            self._curriculum.update(gather_object([row["problem_id"] for row in inputs]), self._outcomes)
        if self._credit is not None:
            output["advantages"] = self._credit(inputs, output, self.num_generations)  # type: ignore[attr-defined]
        return output

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        rewards: torch.Tensor = super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]
        numbers = bool(torch.isfinite(rewards).any(dim=1).all()) and not torch.isinf(rewards).any()
        refuse(
            "reward_funcs",
            (
                not numbers,  # NaN is TRL's "no reward".
                "a completion has no finite reward from any reward function, or an infinite one",
                "Return a number for every completion: advantages of a group need all its rewards.",
            ),
        )
        if self._curriculum is not None:
            name = self.reward_func_names[self._outcome]  # type: ignore[attr-defined]
            of_outcome = rewards[:, self._outcome]
            refuse(
                "reward_funcs",
                (
                    not torch.isfinite(of_outcome).all(),
                    f"{name} gives a completion no finite reward, so whether it is right is not known",
                    "Return a number for every completion, or name another reward (CurriculumConfig.outcome).",
                ),
            )
            self._outcomes = of_outcome.tolist()
        return rewards

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if self._curriculum is None:
            return super()._get_train_sampler(dataset)  # type: ignore[misc]
        args: GRPOConfig = self.args  # type: ignore[attr-defined]
        return CurriculumSampler(
            self._curriculum,
            self.train_dataset if dataset is None else dataset,  # type: ignore[attr-defined]
            group_size=self.num_generations,  # type: ignore[attr-defined]
            groups=args.generation_batch_size // self.num_generations,  # type: ignore[attr-defined]
            repeats=self.num_iterations * args.steps_per_generation,  # type: ignore[attr-defined]
            batches=args.max_steps if args.max_steps > 0 else None,
        )


class FeatureGRPOTrainer(FeatureMixin, GRPOTrainer):
    """TRL's GRPOTrainer with `credit` and `curriculum`; without these it is GRPOTrainer."""


def _outcome_of(names: Sequence[str], curriculum: Curriculum) -> int:
    """Index of the reward function that says what is right.

    Raises:
        TsaeError: where it cannot be distinguished from others, or the named one is missing.
    """
    try:
        return list(names).index(outcome_reward(names, curriculum.config.outcome))
    except TsaeError as error:
        raise TsaeError(error.what, where="reward_funcs", fix="Name it: CurriculumConfig(outcome=…).") from error


def check_arguments(args: GRPOConfig, tokenizer: Any, credit: AdvantageRule | None) -> None:
    """Refuse before training what would not work.

    Raises:
        TsaeError: for a tokenizer without eos, a loss without token advantages, or groups split over processes.
    """
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    endless = "the tokenizer has no end-of-sequence token, so that no response would ever end"
    refuse("processing_class", (tokenizer.eos_token_id is None, endless, "Set its eos_token."))
    if credit is None:
        return
    local = args.per_device_train_batch_size * args.steps_per_generation
    refuse(
        "GRPOConfig",
        (
            args.loss_type not in LOSS_TYPES,
            f"loss_type={args.loss_type!r} takes one advantage a trajectory",
            f"Use one of {', '.join(LOSS_TYPES)} with token credit.",
        ),
        (
            args.importance_sampling_level != "token" or args.off_policy_mask_threshold is not None,
            "token credit needs importance_sampling_level='token' and no off_policy_mask_threshold",
            "Leave both at their defaults.",
        ),
        (
            local % args.num_generations,
            f"{local} completions a process do not hold whole groups of {args.num_generations}",
            "Make per_device_train_batch_size · steps_per_generation a multiple of num_generations.",
        ),
    )
