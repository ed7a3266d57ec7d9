"""Config of a temporal SAE and of its training. Imports nothing heavy: the CLI builds its options from it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import inf
from numbers import Integral
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tsae.activations.config import Axis, Partner
from tsae.base.ranges import need_numbers
from tsae.errors import TsaeError

InitialBias = Literal["geometric_median", "mean", "zero"]
Precision = Literal["float32", "bfloat16"]

_MOST_TOKENS = 100_000_000_000  # far more than any published SAE was trained on


@dataclass(frozen=True)
class SAEConfig:
    """What the T-SAE is and what it is trained for (Bhalla et al., arXiv 2511.05541)."""

    d_sae: int = 4096
    """Width of the dictionary: number of latents."""
    k: int = 20
    """Latents active per token, on average over a batch (BatchTopK)."""
    groups: tuple[float, ...] = (0.1, 0.9)
    """Shares of the latents in the Matryoshka groups, which add up to 1. The first group is the high-level one; every
    group is decoded together with those before it. The paper's are .2 and .8, which explain less variance, above all
    after short trainings (docs/measured.md). (1.0,) is a plain BatchTopK SAE."""
    group_weights: tuple[float, ...] | None = None
    """Weight of the reconstruction up to each group; by default ½ for the high-level group where there are others and a
    temporal term, else 1. The paper's are 1 and 1, those of its authors' code the groups' shares, .2 and .8."""
    temporal: Literal["contrastive", "l1"] = "contrastive"
    """What makes the high-level codes of partners alike: InfoNCE, as in the paper, or the similarity-weighted L1
    distance that its authors' code has in its place without the contrastive flag."""
    temporal_weight: float = 1.0
    """Weight α of the temporal term; 0 gives a plain Matryoshka SAE."""
    similarity: Literal["cosine", "inner"] = "cosine"
    """Of two tokens' high-level codes in the InfoNCE term: cosine, as in the paper, or the raw inner product of its
    authors' code."""
    negatives: Literal["trajectories", "batch"] = "trajectories"
    """What a pair is contrasted with in the InfoNCE term: the batch's pairs of other trajectories, or all its other
    pairs. The paper draws single pairs, of which hardly two are of one trajectory; here windows are read, and a token's
    neighbours would be pushed apart. Copies of a pair's tokens, as rollouts of one prompt share them, are no negatives
    of it in either case."""
    temperature: float = 0.05
    """Divides the similarities in the InfoNCE term. Without one (1.0), cosines between 0 and 1 leave the term near
    chance. Chosen on the testbed among the settings that docs/measured.md lists."""
    aux_weight: float = 1 / 8
    """Weight of AuxK, the reconstruction of the residual by dead latents (Gao et al., arXiv 2406.04093, with 1/32)."""
    dead_after_tokens: int | None = None
    """A latent that did not fire for this many tokens is dead; by default a thirtieth of the training, at most
    10 M."""

    def __post_init__(self) -> None:
        need_numbers(self)
        _check_choices(self)
        for name in ("d_sae", "k", "dead_after_tokens"):
            value = getattr(self, name)
            odd = isinstance(value, bool) or not isinstance(value, Integral | None)
            _refuse(self, odd, f"{name}={value!r} is no whole number")
        _refuse(self, self.k < 1 or self.d_sae < 2, f"k={self.k} and d_sae={self.d_sae} do not make an SAE")
        _refuse(self, self.k > self.d_sae, f"k={self.k} exceeds d_sae={self.d_sae}", "Lower k or widen d_sae.")
        # JSON knows no tuples.
        object.__setattr__(self, "groups", tuple(self.groups))
        if self.group_weights is not None:
            object.__setattr__(self, "group_weights", tuple(self.group_weights))
        _refuse(
            self,
            not self.groups or not abs(sum(self.groups) - 1) <= 1e-6 or min(self.groups) <= 0,
            f"groups={self.groups} add up to {sum(self.groups):g}, expected positive shares that add up to 1",
            "Give shares such as (0.1, 0.9).",
        )
        _refuse(
            self,
            any(stop <= start for start, stop in self.group_bounds),
            f"groups={self.groups} of d_sae={self.d_sae} leave a group empty",
            "Widen d_sae, or give larger shares.",
        )
        given = self.weights
        _refuse(
            self,
            len(given) != len(self.groups) or min(given) < 0 or not 0 < sum(given) < inf,
            f"group_weights={self.group_weights} do not go with groups={self.groups}",
            "Give one weight of at least 0 per group, not all 0.",
        )
        _refuse(
            self,
            not (0 <= self.temporal_weight < inf and 0 <= self.aux_weight < inf and 0 < self.temperature < inf),
            f"temporal_weight={self.temporal_weight}, aux_weight={self.aux_weight} must be at least 0, "
            f"temperature={self.temperature} above 0",
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
    """Adjacent tokens read together; with partner "previous" each window gives up to window − 1 pairs."""
    partner: Partner = "previous"
    """The token that the temporal term pairs a token with: "previous", the one before it, as in the paper; "earlier", a
    random earlier one of the trajectory, as its authors' code does by default; "step", a random earlier one of the same
    reasoning step."""
    step_ends: tuple[int, ...] = ()
    """Ids of the tokens that end a reasoning step, for partner "step", such as those that contain a newline
    (`Checkpoint.tokens_with`). The end of the prompt ends a step too."""
    balance: tuple[Axis, ...] = ("reader",)
    """Every combination of these that has tokens gives an epoch the same number of tokens, so that none dominates the
    dictionary: small ones are read more often, large ones spread over epochs. Without any, each keeps the share that it
    has in the store."""
    span: Literal["response", "thinking", "answer", "prompt", "all"] = "all"
    """Which tokens count; special tokens never do, nor tokens of a response that the policy did not sample."""
    max_norm: float = 10.0
    """Tokens whose norm exceeds this multiple of the median (attention sinks) are left out, and counted. Norms are
    about the centre, the median of every dimension."""
    learning_rate: float | None = None
    """Adam's; by default 4e-4 · sqrt(16384 / d_sae) · sqrt(1500 / steps), the last factor between 1 and 2: the scaling
    of Gao et al., from twice their rate, which the shorter trainings here can use, and from four times in the shortest.
    Steps are tokens // batch_tokens. A training that starts from an SAE has no such factor."""
    temporal_rise_share: float = 0.0
    """Share of the steps over which the weight of the temporal term rises linearly from 0 to
    `SAEConfig.temporal_weight`. Features are then found before they are made smooth: a short training explains a little
    more variance, its high-level group is less smooth, and more of it is dead; docs/measured.md has the figures. A
    training that starts from an SAE has the full weight from the first step."""
    warmup_share: float = 0.05
    """Share of the steps over which the learning rate rises linearly."""
    decay_share: float = 0.2
    """Share of the steps, at the end, over which it falls linearly to 0."""
    initial_bias: InitialBias = "geometric_median"
    """Where the decoder bias starts: at the geometric median of a sample (Bricken et al. 2023), its mean, or zero."""
    seed: int = 0
    """Seed of the initial weights and, unless data_seed is given, of the data's order."""
    data_seed: int | None = None
    """Seed of the data's order and of the norms' sample; by default that of the weights. Trainings that share it share
    batches."""
    device: str = "cpu"
    """Torch device: cpu, cuda, cuda:1, …"""
    precision: Precision = "float32"
    """Precision of the large matrix products: the encoder's, AuxK's, and on a GPU decoding and weight gradients where
    dense ones pay. "bfloat16" rounds their factors and adds up in float32; master weights, Adam's moments, codes,
    similarities, losses and means stay float32. It is for GPUs: on a CPU it is no faster."""
    save_every_steps: int = 500
    """Steps between checkpoints, from the last of which a run that was killed goes on."""
    resume: Literal["auto", "never"] = "auto"
    """"auto" goes on from a checkpoint of the same training and loads a finished one; "never" trains anew."""
    log_to: str | None = None
    """Where metrics also go: wandb:PROJECT (Weights & Biases), trackio:PROJECT or tensorboard:FOLDER."""

    def __post_init__(self) -> None:
        need_numbers(self)
        _check_choices(self)
        # JSON knows no tuples.
        object.__setattr__(self, "step_ends", tuple(self.step_ends))
        object.__setattr__(self, "balance", tuple(self.balance))
        _refuse(
            self,
            bool(self.step_ends) and self.partner != "step",
            f'step_ends are given, but partner="{self.partner}" knows no steps',
            'Set partner="step", or leave step_ends out.',
        )
        _refuse(
            self,
            not set(self.balance) <= set(get_args(Axis)) or len(set(self.balance)) < len(self.balance),
            f"balance={self.balance} must name some of {', '.join(get_args(Axis))}, each once",
        )
        tool, _, named = (self.log_to or "wandb:-").partition(":")
        _refuse(
            self,
            tool not in ("wandb", "trackio", "tensorboard") or not named,
            f"log_to={self.log_to!r} is none of wandb:PROJECT, trackio:PROJECT, tensorboard:FOLDER",
        )
        _refuse(self, self.tokens > _MOST_TOKENS, f"tokens={self.tokens:,} are more than {_MOST_TOKENS:,}")
        rate = self.learning_rate
        _refuse(self, rate is not None and not 0 < rate < 10, f"learning_rate={rate} is not between 0 and 10")
        _refuse(self, not self.max_norm > 0, f"max_norm={self.max_norm} is not positive")
        _refuse(self, self.save_every_steps < 1, f"save_every_steps={self.save_every_steps} is less than 1")
        few = self.tokens < self.batch_tokens
        _refuse(self, few, f"tokens={self.tokens} is less than batch_tokens={self.batch_tokens}")
        _refuse(
            self,
            self.batch_tokens < 2 * self.window or self.window < 2,
            f"batch_tokens={self.batch_tokens} must hold at least two windows of window={self.window} >= 2 tokens",
        )
        rise, warmup, decay = self.temporal_rise_share, self.warmup_share, self.decay_share
        _refuse(self, not 0 <= rise <= 1, f"temporal_rise_share={rise} is not between 0 and 1")
        too_long = not 0 <= warmup + decay <= 1 or min(warmup, decay) < 0
        _refuse(self, too_long, f"warmup_share={warmup} and decay_share={decay} exceed 1")


def _refuse(config: Any, wrong: bool, message: str, fix: str | None = None) -> None:
    if wrong:
        raise TsaeError(message, where=type(config).__name__, fix=fix)


def _check_choices(config: Any) -> None:
    """Check that every word is one that its field allows; only the command line checks it otherwise."""
    for name, hint in get_type_hints(type(config)).items():
        value, allowed = getattr(config, name), get_args(hint)
        wrong = get_origin(hint) is Literal and value not in allowed
        _refuse(config, wrong, f"{name}={value!r} is none of {', '.join(map(repr, allowed))}")
