"""Config of a temporal SAE, of its training, and of what goes to the Hub. Light: the CLI builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tsae.activations.config import Axis, Partner
from tsae.base.validation import Count, Daily, Fraction, NotNegative, Positive, Seed, config
from tsae.errors import refuse

InitialBias = Literal["geometric_median", "mean", "zero"]
Precision = Literal["float32", "bfloat16"]


@config
class SAEConfig:
    """What the T-SAE is and what it is trained for (Bhalla et al., arXiv 2511.05541)."""

    d_sae: Daily[Annotated[int, Field(ge=2)]] = 4096
    """Width of the dictionary: number of latents."""
    k: Daily[Count] = 20
    """Latents active per token, on average over a batch (BatchTopK)."""
    groups: tuple[Positive, ...] = (0.1, 0.9)
    """Shares of the latents in the Matryoshka groups, which add up to 1. The first group is the high-level one; every
    group is decoded together with those before it. The paper's are .2 and .8, which explain less variance, above all
    after short trainings (docs/measured.md). (1.0,) is a plain BatchTopK SAE."""
    group_weights: tuple[NotNegative, ...] | None = None
    """Weight of the reconstruction up to each group; by default ½ for the high-level group where there are others and a
    temporal term, else 1. The paper's are 1 and 1, those of its authors' code the groups' shares, .2 and .8."""
    temporal: Literal["contrastive", "l1"] = "contrastive"
    """What makes the high-level codes of partners alike: InfoNCE, as in the paper, or the similarity-weighted L1
    distance that its authors' code has in its place without the contrastive flag."""
    temporal_weight: NotNegative = 1.0
    """Weight α of the temporal term; 0 gives a plain Matryoshka SAE."""
    similarity: Literal["cosine", "inner"] = "cosine"
    """Similarity of two tokens' high-level codes in the InfoNCE term: cosine, as in the paper, or the raw inner product
    of its authors' code."""
    negatives: Literal["trajectories", "batch"] = "trajectories"
    """What a pair is contrasted with in the InfoNCE term: the batch's pairs of other trajectories, or all its other
    pairs. The paper draws single pairs, of which hardly two are of one trajectory. Here windows are read, and a token's
    neighbours would be pushed apart. Copies of a pair's tokens, which rollouts of one prompt share, are never its
    negatives."""
    temperature: Positive = 0.05
    """Divides the similarities in the InfoNCE term. Without one (1.0), cosines between 0 and 1 leave the term near
    chance. Chosen on the testbed among the settings that docs/measured.md lists."""
    aux_weight: NotNegative = 1 / 8
    """Weight of AuxK, the reconstruction of the residual by dead latents (Gao et al., arXiv 2406.04093, with 1/32)."""
    dead_after_tokens: Count | None = None
    """A latent that did not fire for this many tokens is dead; by default a thirtieth of the training, at most
    10 M."""

    def __post_init__(self) -> None:
        k, d_sae, groups = self.k, self.d_sae, self.groups
        apart = abs(sum(groups) - 1) > 1e-6
        empty = any(stop <= start for start, stop in self.group_bounds)
        odd = len(self.weights) != len(groups) or not sum(self.weights) > 0
        sums = f"groups={groups} add up to {sum(groups):g}, expected shares that add up to 1"
        weights = f"group_weights={self.group_weights} do not go with groups={groups}"
        refuse(
            type(self).__name__,
            (k > d_sae, f"k={k} exceeds d_sae={d_sae}", "Lower k or widen d_sae."),
            (apart, sums, "Give shares such as (0.1, 0.9)."),
            (empty, f"groups={groups} of d_sae={d_sae} leave a group empty", "Widen d_sae, or give larger shares."),
            (odd, weights, "Give one weight per group, not all 0."),
        )

    @property
    def d_high(self) -> int:
        """Number of high-level latents, the first ones."""
        return self.group_bounds[0][1]

    @property
    def weights(self) -> tuple[float, ...]:
        """`group_weights`, or the default for these groups."""
        if self.group_weights is not None:
            return self.group_weights
        first = 0.5 if self.temporal_weight > 0 and len(self.groups) > 1 else 1.0
        return (first, *[1.0] * (len(self.groups) - 1))

    @property
    def group_bounds(self) -> tuple[tuple[int, int], ...]:
        """(first latent, latent after the last) of every group."""
        ends = [round(total * self.d_sae) for total in accumulate(self.groups)]
        return tuple(zip([0, *ends[:-1]], ends, strict=True))


@config
class TrainingConfig:
    """How a T-SAE is trained on a store."""

    site: Daily[str | None] = None
    """TransformerLens name; by default the store's only site."""
    tokens: Daily[Annotated[int, Field(ge=1, le=100_000_000_000)]] = 2_000_000
    """Tokens to train on; the store is read again in another order when it has fewer."""
    batch_tokens: Daily[Count] = 2048
    """Tokens of one step."""
    window: Annotated[int, Field(ge=2)] = 8
    """Adjacent tokens read together; with partner "previous" each window gives up to window − 1 pairs."""
    partner: Partner = "previous"
    """The token that the temporal term pairs a token with. "previous": the token before it, as in the paper. "earlier":
    a random earlier token of the trajectory, as its authors' code does by default. "step": a random earlier token of
    the same reasoning step."""
    step_ends: tuple[int, ...] = ()
    """Ids of the tokens that end a reasoning step, for partner "step", such as those that contain a newline
    (`Checkpoint.tokens_with`). The end of the prompt ends a step too."""
    balance: tuple[Axis, ...] = ("reader",)
    """Every combination of these that has tokens gives an epoch the same number of tokens, so that none dominates the
    dictionary. Small ones are read more often, large ones spread over epochs. Without any, each keeps its share of the
    store."""
    span: Literal["response", "thinking", "answer", "prompt", "all"] = "all"
    """Which tokens count. Special tokens never count, nor tokens of a response that the policy did not sample."""
    max_norm: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 10.0
    """Tokens whose norm exceeds this multiple of the median (attention sinks) are left out, and counted. Norms are
    about the centre, the median of every dimension."""
    learning_rate: Annotated[float, Field(gt=0, lt=10)] | None = None
    """Adam's learning rate. By default 4e-4 · sqrt(16384 / d_sae) · sqrt(1500 / steps), with the last factor between 1
    and 2. This is the scaling of Gao et al., from twice their rate, which the shorter trainings here can use. Steps are
    tokens // batch_tokens. A training that starts from an SAE has no last factor."""
    temporal_rise_share: Fraction = 0.0
    """Share of the steps over which the weight of the temporal term rises linearly from 0 to
    `SAEConfig.temporal_weight`. Features are then found before they are made smooth. In a short training this explains
    a little more variance; the high-level group is less smooth, and more of it is dead. A training that starts from an
    SAE has the full weight from the first step."""
    warmup_share: Fraction = 0.05
    """Share of the steps over which the learning rate rises linearly."""
    decay_share: Fraction = 0.2
    """Share of the steps, at the end, over which it falls linearly to 0."""
    initial_bias: InitialBias = "geometric_median"
    """Where the decoder bias starts: at the geometric median of a sample (Bricken et al. 2023), its mean, or zero."""
    seed: Daily[Seed] = 0
    """Seed of the initial weights and, unless data_seed is given, of the data's order."""
    data_seed: Seed | None = None
    """Seed of the data's order and of the norms' sample; by default that of the weights. Trainings that share it share
    batches."""
    device: Daily[str] = "cpu"
    """Torch device: cpu, cuda, cuda:1, …"""
    precision: Daily[Precision] = "float32"
    """Precision of the large matrix products: those of the encoder, of AuxK, and on a GPU of decoding and weight
    gradients where dense ones pay. "bfloat16" rounds their factors and adds up in float32. Master weights, Adam's
    moments, codes, similarities, losses and means stay float32. It is for GPUs: on a CPU it is not faster."""
    save_every_steps: Count = 500
    """Steps between checkpoints. A killed run resumes from the last one."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" resumes from a checkpoint of the same training and loads a finished one; "never" trains anew."""
    log_to: Annotated[str, Field(pattern="^(wandb|trackio|tensorboard):.")] | None = None
    """Where metrics also go: wandb:PROJECT (Weights & Biases), trackio:PROJECT or tensorboard:FOLDER."""

    def __post_init__(self) -> None:
        window, tokens, batch, warmup, decay = (
            getattr(self, name) for name in ("window", "tokens", "batch_tokens", "warmup_share", "decay_share")
        )
        steps = f'step_ends are given, but partner="{self.partner}" knows no steps'
        small = f"batch_tokens={batch} must hold at least two windows of window={window} tokens"
        shares = f"warmup_share={warmup} and decay_share={decay} exceed 1"
        twice = len(set(self.balance)) < len(self.balance)
        more = "Train on more tokens, or take smaller batches."
        refuse(
            type(self).__name__,
            (self.step_ends and self.partner != "step", steps, 'Set partner="step", or leave step_ends out.'),
            (twice, f"balance={self.balance} names an axis twice", "Name each once."),
            (tokens < batch, f"tokens={tokens} is less than batch_tokens={batch}", more),
            (batch < 2 * window, small, "Take larger batches."),
            (warmup + decay > 1, shares, "Lower one of them."),
        )


@dataclass(frozen=True)
class PushConfig:
    """What goes to the Hub, and what its cards say."""

    licence: str | None = None
    """The Hub's name of a licence, such as apache-2.0, mit or cc-by-4.0; "other" or "unknown" are names too."""
    base_model: str | None = None
    """The Hub's name of the model whose activations were read; by default the base of the run, if it came from the
    Hub."""
    dataset: bool = False
    """Also push features and diff of a run, as the data set NAME-features. They hold prompts and responses."""
    space: bool = False
    """Also push the page of a run, as the static Space NAME-report. It holds prompts and responses."""
    evaluation: Path | None = None
    """File that `tsae evaluate --json` wrote, for the SAE's metrics; by default that of the run."""
    private: bool = False
    """Make new repositories private."""
