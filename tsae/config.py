"""Configs of `tsae run`, `tsae watch` and `tsae demo`. Light: the command line reads its options from them."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import Annotated, get_args

from pydantic import Field
from tyro.conf import OmitArgPrefixes, Positional

from tsae.attribution.config import AttributionConfig, Kind
from tsae.base.validation import Count, Daily, NotNegative, Positive, Seed, UserPath, config
from tsae.causal.config import CausalConfig
from tsae.diff.config import DiffConfig
from tsae.errors import refuse
from tsae.rollouts.config import BandsBy, BandSource, ImportConfig, ServerConfig, Unfit
from tsae.sae.config import SAEConfig, TrainingConfig

_KINDS: tuple[Kind, ...] = (
    "band", "outcome", "lone success", "third of the run", "band and outcome and third", "behaviour", "reward",
)  # fmt: skip


@config
class RunConfig:
    """What to analyse in a training run."""

    path: Positional[UserPath]
    """The trainer's output folder: checkpoints (models or LoRA adapters) and its rollout log."""
    to: Daily[UserPath] = Path("analysis")
    """Folder for rollouts, activations, SAE, evaluation, features, diff and report. An unfinished run in it is
    resumed."""
    base: Daily[str | None] = None
    """The model that training started from: a folder or Hugging Face id. By default the model that the adapters, the
    checkpoints' configuration, a model card or the trainer's settings name; else the earliest checkpoint stands in."""
    log: Daily[UserPath | None] = None
    """The rollout log; by default the run's folder completions, or else the log in the run's folder."""
    checkpoints: Daily[tuple[str, ...]] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    bands_from: UserPath | None = None
    """Parquet file of the base's rollouts on the same problems (tsae rollouts sample), on which bands are measured. By
    default bands come from the log. They are not compared if the run learned and asked each problem at one step
    only."""
    source: OmitArgPrefixes[BandSource] = field(default_factory=BandSource)
    """Bands from elsewhere, which are then contrasted. The policies' own bands are kept beside them (--by own)."""
    by: BandsBy = "auto"
    """Whose bands are contrasted, if several are known: own, difficulty or level. By default those from elsewhere."""
    site: str | None = None
    """TransformerLens name, such as blocks.14.hook_resid_post; by default the output of the middle block."""
    tokens: Daily[Count] = 1_000_000
    """Largest number of tokens that each reader reads. From a longer log problems are drawn, as many from every band,
    with all their responses or at least 16. The store then holds about tokens · readers · d_model numbers."""
    sae: UserPath | None = None
    """A published SAE in place of training one: a path, org/name or org/name/folder on the Hugging Face Hub, or
    saelens:RELEASE/ID. Its site is read; --site names it only if the files do not."""
    d_sae: Count | None = None
    """Width of the SAE. By default the largest power of two, up to 8 · d_model, with which a latent fires 1,000 times
    in the store on average."""
    k: Count | None = None
    """Latents active per token; by default d_model / 12, at least 4 and at most 20."""
    training_tokens: Count | None = None
    """Tokens to train the SAE on; by default 4 times the store. A small store is read up to 20 times, to reach 1 M."""
    device: Daily[str] = "cpu"
    """Torch device of capture and training: cpu, cuda, cuda:1, …"""
    seed: Seed = 0
    """Seed of everything random."""
    importing: OmitArgPrefixes[ImportConfig] = field(default_factory=lambda: ImportConfig(skip=get_args(Unfit)))
    """How the log is read. Trajectories that do not fit are left out and counted (--skip)."""
    diff: DiffConfig = field(default_factory=DiffConfig)
    """Which contrasts are drawn. The run's seed counts in place of its own."""
    attribute: Daily[bool] = True
    """Find which samples did that: the run is replayed from its base, its log and the settings that its trainer left.
    If something is missing, one sentence names it. Takes about ten times as long as the training's own updates took,
    without its sampling. Logs of more than --tokens are left out."""
    problems: UserPath | None = None
    """Parquet file of the base's responses, with outcomes, to problems that the run did not train on (tsae rollouts
    sample). Accuracy and behaviours are then attributed on these. By default on the log's own problems."""
    attribution: AttributionConfig = field(
        default_factory=lambda: AttributionConfig(n_features=4, n_fixed=64, groups=_KINDS)
    )
    """What is attributed: by default the features that the diff found to move furthest, if it found any. The run's
    device and seed take the place of its own."""
    sample: Daily[Annotated[int, Field(ge=1, le=100_000)] | None] = None
    """Let every reader answer the log's problems so many times anew, and compare these responses instead of the log's.
    Behaviour, bands and pass@k then do not depend on what the log holds. From a log beyond --tokens, problems are
    drawn."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Samples instead of this machine (--sample). It serves every reader under its id."""
    causal: Daily[bool] = False
    """Also ablate, steer and transplant the features that every run most clearly raised, beside matched controls. Given
    later, this adds them to an analysis that is there."""
    tests: CausalConfig = field(default_factory=CausalConfig)
    """How these features are tested (--causal)."""
    minutes: Positive | None = None
    """Most minutes that fresh samples take, and most that causal tests take, about. Fewer problems are then sampled.
    The same command, given again, makes the tests that did not fit in."""

    def __post_init__(self) -> None:
        trained = {name: getattr(self, name) for name in ("d_sae", "k", "training_tokens") if self.sae is not None}
        named = ", ".join(f"{name}={value}" for name, value in trained.items() if value is not None)
        fix = "Give sample (--sample)."
        analysis = all((self.path / name).is_file() for name in ("run.json", "stages.json"))
        refuse(self.path, (analysis, "is what `tsae run` wrote", "Give the trainer's folder, and this one as --to."))
        refuse(
            "RunConfig",
            (self.server.url and self.sample is None, "a server is given, and nothing to sample", fix),
            (
                self.by in ("difficulty", "level") and self.by not in self.source.kinds,
                f"by={self.by}, and no bands of this kind are given",
                "Give difficulty and difficulty_column (--difficulty), or bands_column (--bands-column).",
            ),
            (named, f"{named} is for training an SAE, and sae={self.sae} is given", "Leave one of them out."),
        )
        # What cannot be trained is refused now, not after the capture.
        if self.d_sae is not None:
            SAEConfig(d_sae=self.d_sae, k=self.k or 1)
        if self.training_tokens is not None:
            TrainingConfig(tokens=max(self.training_tokens, TrainingConfig().batch_tokens))


@config
class WatchConfig:
    """How a training is followed."""

    every: Daily[NotNegative] = 60.0
    """Seconds from one look at the training's folder to the next."""
    until: Daily[Count | None] = None
    """Stop when this step's checkpoint, or a later one, has been analysed. By default the command runs until it is
    interrupted."""
    once: Daily[bool] = False
    """Look once, analyse what is new, and stop: for scripts and cron."""
    quiet: NotNegative = 10.0
    """Seconds for which a checkpoint or a file of the log must not have changed to count as complete. In a file of JSON
    lines, the lines that were there so many seconds ago count."""
    retrain: bool = False
    """Train the SAE anew in every update; then the analysis is that of `tsae run`. By default the SAE of the first
    update is kept: only new things are computed, and features keep their numbers."""


@config
class DemoConfig:
    """Size and seed of the demo."""

    to: Daily[UserPath] = Path("demo")
    """Folder for rollouts, activations, SAE, features, diff and report."""
    problems: Annotated[int, Field(ge=1, le=10_000)] = 60
    """Problems of each level (1, 4 to 6, and 10 to 14 operations)."""
    samples: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Responses per problem and checkpoint."""
    band_samples: Annotated[int, Field(ge=1, le=10_000)] = 24
    """Further responses of the base per problem, to measure bands on."""
    steps: Daily[bool] = False
    """Also follow features along steps 25, 50, 100 and 150 of the runs. Takes about a minute more."""
    attribute: Daily[bool] = True
    """Also say which samples did that in a fourth, short run, on problems of all levels. Takes about a minute."""
    seed: Daily[Seed] = 0
    """Seed of everything random."""
    sae: SAEConfig = field(default_factory=lambda: SAEConfig(d_sae=256, k=8))
    """Shape of the T-SAE."""
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(tokens=1_500_000, batch_tokens=1024))
    """Training of the T-SAE."""
