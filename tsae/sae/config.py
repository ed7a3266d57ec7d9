"""Config of a temporal SAE and of its training. Imports nothing heavy: the CLI builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from tsae.errors import TsaeError


@dataclass(frozen=True)
class SAEConfig:
    """What the T-SAE is and what it is trained for (Bhalla et al., arXiv 2511.05541)."""

    d_sae: int = 4096
    """Width of the dictionary: number of latents."""
    k: int = 20
    """Latents active per token, on average over a batch (BatchTopK)."""
    groups: tuple[float, ...] = (0.2, 0.8)
    """Shares of the latents in the Matryoshka groups, which add up to 1. The first group is the high-level one; every
    group is decoded together with those before it. The paper's are .2 and .8; (1.0,) is a plain BatchTopK SAE."""
    group_weights: tuple[float, ...] | None = None
    """Weight of the reconstruction up to each group; by default 1 each, as in the paper. Its authors' code has the
    groups' shares, .2 and .8."""
    temporal_weight: float = 1.0
    """Weight α of the InfoNCE term between high-level codes of adjacent tokens; 0 gives a plain Matryoshka SAE."""
    similarity: Literal["cosine", "inner"] = "cosine"
    """Of two tokens' high-level codes in the InfoNCE term: cosine, as in the paper, or the raw inner product of its
    authors' code."""
    negatives: Literal["trajectories", "batch"] = "trajectories"
    """What a pair is contrasted with in the InfoNCE term: the batch's pairs of other trajectories, or all its other
    pairs. The paper draws single pairs, of which hardly two are of one trajectory; here windows are read, and a token's
    neighbours would be pushed apart."""
    temperature: float = 0.1
    """Divides the similarities in the InfoNCE term. Without one (1.0), cosines between 0 and 1 leave the term near
    chance. Chosen on the testbed among the settings that docs/measured.md lists."""
    aux_weight: float = 1 / 32
    """Weight of AuxK, the reconstruction of the residual by dead latents (Gao et al., arXiv 2406.04093)."""
    dead_after_tokens: int | None = None
    """A latent that did not fire for this many tokens is dead; by default a tenth of the training, at most 10 M."""

    def __post_init__(self) -> None:
        if self.k < 1 or self.d_sae < 2:
            raise TsaeError(f"k={self.k} and d_sae={self.d_sae} do not make an SAE", where="SAEConfig")
        if self.k > self.d_sae:
            raise TsaeError(f"k={self.k} exceeds d_sae={self.d_sae}", where="SAEConfig", fix="Lower k or widen d_sae.")
        # JSON knows no tuples.
        object.__setattr__(self, "groups", tuple(self.groups))
        if self.group_weights is not None:
            object.__setattr__(self, "group_weights", tuple(self.group_weights))
        if not self.groups or abs(sum(self.groups) - 1) > 1e-6 or min(self.groups) <= 0:
            raise TsaeError(
                f"groups={self.groups} add up to {sum(self.groups):g}, expected positive shares that add up to 1",
                where="SAEConfig",
                fix="Give shares such as (0.2, 0.8).",
            )
        if any(stop <= start for start, stop in self.group_bounds):
            raise TsaeError(
                f"groups={self.groups} of d_sae={self.d_sae} leave a group empty",
                where="SAEConfig",
                fix="Widen d_sae, or give larger shares.",
            )
        if self.group_weights is not None and (
            len(self.group_weights) != len(self.groups) or min(self.group_weights) < 0 or sum(self.group_weights) == 0
        ):
            raise TsaeError(
                f"group_weights={self.group_weights} do not go with groups={self.groups}",
                where="SAEConfig",
                fix="Give one weight of at least 0 per group, not all 0.",
            )
        if self.temporal_weight < 0 or self.aux_weight < 0 or self.temperature <= 0:
            raise TsaeError(
                f"temporal_weight={self.temporal_weight}, aux_weight={self.aux_weight} must be at least 0, "
                f"temperature={self.temperature} above 0",
                where="SAEConfig",
            )

    @property
    def d_high(self) -> int:
        """Number of high-level latents, the first ones."""
        return self.group_bounds[0][1]

    @property
    def group_bounds(self) -> tuple[tuple[int, int], ...]:
        """(first latent, latent after the last) of every group."""
        ends = [round(total * self.d_sae) for total in accumulate(self.groups)]
        return tuple(zip([0, *ends[:-1]], ends, strict=True))


@dataclass(frozen=True)
class TrainingConfig:
    """How a T-SAE is trained on a store."""

    site: str | None = None
    """TransformerLens name; by default the store's only site."""
    tokens: int = 2_000_000
    """Tokens to train on; the store is read again in another order when it has fewer."""
    batch_tokens: int = 2048
    """Tokens of one step."""
    window: int = 8
    """Adjacent tokens read together; each gives up to window − 1 pairs."""
    span: Literal["response", "prompt", "all"] = "all"
    """Which tokens count; special tokens never do."""
    max_norm: float = 10.0
    """Tokens whose norm exceeds this multiple of the median (attention sinks) are left out, and counted."""
    learning_rate: float | None = None
    """Adam's; by default 2e-4 · sqrt(16384 / d_sae), the scaling of Gao et al."""
    warmup_share: float = 0.05
    """Share of the steps over which the learning rate rises linearly."""
    decay_share: float = 0.2
    """Share of the steps, at the end, over which it falls linearly to 0."""
    seed: int = 0
    """Of the initial weights and, unless data_seed is given, of the data's order."""
    data_seed: int | None = None
    """Of the data's order and of the norms' sample; by default the seed. Trainings that share it share batches."""
    device: str = "cpu"
    """A torch device."""
    save_every_steps: int = 500
    """Steps between checkpoints, from the last of which a run that was killed goes on."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" goes on from a checkpoint of the same training and loads a finished one; "never" trains anew."""
    wandb_project: str | None = None
    """Weights & Biases project that metrics are also sent to."""

    def __post_init__(self) -> None:
        if self.save_every_steps < 1:
            raise TsaeError(f"save_every_steps={self.save_every_steps} is less than 1", where="TrainingConfig")
        if self.tokens < self.batch_tokens:
            raise TsaeError(
                f"tokens={self.tokens} is less than batch_tokens={self.batch_tokens}", where="TrainingConfig"
            )
        if self.batch_tokens < 2 * self.window or self.window < 2:
            raise TsaeError(
                f"batch_tokens={self.batch_tokens} must hold at least two windows of window={self.window} >= 2 tokens",
                where="TrainingConfig",
            )
        if not 0 <= self.warmup_share + self.decay_share <= 1 or min(self.warmup_share, self.decay_share) < 0:
            raise TsaeError(
                f"warmup_share={self.warmup_share} and decay_share={self.decay_share} exceed 1",
                where="TrainingConfig",
            )
