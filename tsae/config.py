"""Configs of `tsae run` and `tsae demo`. Light: the command line reads its options from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from tyro.conf import OmitArgPrefixes, Positional

from tsae.attribution.config import AttributionConfig, Kind
from tsae.base.files import expand_paths
from tsae.base.ranges import need_at_most, need_numbers
from tsae.causal.config import CausalConfig
from tsae.diff.config import DiffConfig
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig, ServerConfig, Unfit
from tsae.sae.config import SAEConfig, TrainingConfig

_KINDS: tuple[Kind, ...] = (
    "band", "outcome", "lone success", "third of the run", "band and outcome and third", "behaviour", "reward",
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """What to analyse in a training run."""

    path: Positional[Path]
    """The trainer's output folder: checkpoint-N folders (models or LoRA adapters) and its rollout log."""
    to: Path = Path("analysis")
    """Folder for rollouts, activations, SAE, evaluation, features, diff and report. An unfinished run in it is
    resumed."""
    base: str | None = None
    """The model that training started from: a folder or Hugging Face id. By default the one that the adapters, the
    checkpoints' configuration or their model card name; else the earliest checkpoint takes its place."""
    log: Path | None = None
    """The rollout log; by default the run's folder completions, or else the log in the run's folder."""
    checkpoints: tuple[str, ...] = ()
    """Ids of the readers beside the base; by default the last step of every run."""
    bands_from: Path | None = None
    """Parquet file of the base's rollouts on the same problems (tsae rollouts sample), to measure bands on. By default
    bands come from the log. They are then not compared if the run learns and asks each problem at one step only."""
    site: str | None = None
    """TransformerLens name, such as blocks.14.hook_resid_post; by default the output of the middle block."""
    tokens: int = 1_000_000
    """Most tokens that each reader reads. From a longer log problems are drawn, as many from every band, with all their
    responses or at least 16. The store then holds about tokens · readers · d_model numbers."""
    sae: Path | None = None
    """A published SAE in place of training one: a path, org/name or org/name/folder on the Hugging Face Hub, or
    saelens:RELEASE/ID. Its site is read; --site names it only if the files do not."""
    d_sae: int | None = None
    """Width of the SAE; by default the largest power of two up to 8 · d_model with which a latent fires 1,000 times in
    the store on average."""
    k: int | None = None
    """Latents active per token; by default d_model / 12, at least 4 and at most 20."""
    training_tokens: int | None = None
    """Tokens to train the SAE on; by default 4 times the store. A small store is read up to 20 times, to reach 1 M."""
    device: str = "cpu"
    """Torch device of capture and training: cpu, cuda, cuda:1, …"""
    seed: int = 0
    """Seed of everything random."""
    importing: OmitArgPrefixes[ImportConfig] = field(default_factory=lambda: ImportConfig(skip=get_args(Unfit)))
    """How the log is read. Trajectories that do not fit are left out and counted (--skip)."""
    diff: DiffConfig = field(default_factory=DiffConfig)
    """Which contrasts are drawn. The run's seed takes the place of its seed."""
    attribute: bool = True
    """Say which samples did that: the run is replayed from its base, its log and the settings that its trainer left.
    Otherwise one sentence says what is missing. Logs of more than --tokens are left out: it takes about ten times as
    long as the training's own updates took, without its sampling."""
    problems: Path | None = None
    """Parquet file of the base's responses, with outcomes, to problems that the run did not train on (tsae rollouts
    sample): accuracy and behaviours are attributed there. By default on the log's own problems."""
    attribution: AttributionConfig = field(
        default_factory=lambda: AttributionConfig(n_features=4, n_fixed=64, groups=_KINDS)
    )
    """What is attributed: by default the features that the diff found to move furthest, if it found any. The run's
    device and seed take the place of its own."""
    sample: int | None = None
    """Let every reader answer the log's problems so often anew, and compare these responses instead of the log's: what
    the policies do, by band, and pass@k then do not depend on what the log holds. Of a log beyond --tokens, problems
    are drawn."""
    server: ServerConfig = field(default_factory=ServerConfig)
    """Samples instead of this machine (--sample). It serves every reader under its id."""
    causal: bool = False
    """Also ablate, steer and transplant the features that every run most clearly raised, beside matched controls. Given
    later, this adds them to an analysis that is there."""
    tests: CausalConfig = field(default_factory=CausalConfig)
    """How these features are tested (--causal)."""
    minutes: float | None = None
    """Most minutes that fresh samples take, and most that causal tests take, about. Fewer problems are then sampled;
    tests that did not fit in are made when the same command is given again."""

    def __post_init__(self) -> None:
        need_numbers(self)
        expand_paths(self)
        need_at_most(self, sample=100_000)
        if self.server.url and self.sample is None:
            raise TsaeError(
                "a server is given, and nothing to sample", where="RunConfig", fix="Give sample (--sample)."
            )
        if self.minutes is not None and not self.minutes > 0:
            raise TsaeError(f"minutes={self.minutes} is not positive", where="RunConfig")
        for name in ("tokens", "d_sae", "k", "training_tokens", "sample"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise TsaeError(f"{name}={value} is less than 1", where="RunConfig")
            if value is not None and self.sae is not None and name != "tokens":
                what = f"{name}={value} is for training an SAE, and sae={self.sae} is given"
                raise TsaeError(what, where="RunConfig", fix="Leave one of them out.")
        # What cannot be trained is refused now, not after the capture.
        if self.d_sae is not None:
            SAEConfig(d_sae=self.d_sae, k=self.k or 1)
        if self.training_tokens is not None:
            TrainingConfig(tokens=max(self.training_tokens, TrainingConfig().batch_tokens))


@dataclass(frozen=True)
class WatchConfig:
    """How a training is followed."""

    every: float = 60.0
    """Seconds from one look at the training's folder to the next."""
    until: int | None = None
    """Stop when this step's checkpoint, or a later one, has been analysed. By default watching goes on until it is
    interrupted."""
    once: bool = False
    """Look once, analyse what is new, and stop: for scripts and cron."""
    quiet: float = 10.0
    """Seconds for which a checkpoint or a file of the log must not have changed to count as complete. Of a file of JSON
    lines, the lines count that were there so many seconds ago."""
    retrain: bool = False
    """Train the SAE anew in every update; then the analysis is that of `tsae run`. By default the SAE of the first
    update is kept, so that only what is new is computed, and features keep their numbers."""

    def __post_init__(self) -> None:
        need_numbers(self)
        for name in ("every", "quiet"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise TsaeError(f"{name}={getattr(self, name)} is no number of seconds", where="WatchConfig")
        if self.until is not None and self.until < 1:
            raise TsaeError(f"until={self.until} is less than 1", where="WatchConfig")


@dataclass(frozen=True)
class DemoConfig:
    """Size and seed of the demo."""

    to: Path = Path("demo")
    """Folder for rollouts, activations, SAE, features, diff and report."""
    problems: int = 60
    """Problems of each level (1, 4 to 6, and 10 to 14 operations)."""
    samples: int = 8
    """Responses per problem and checkpoint."""
    band_samples: int = 24
    """Further responses of the base per problem, to measure bands on."""
    steps: bool = False
    """Also follow features along steps 25, 50, 100 and 150 of the runs. Takes about a minute more."""
    attribute: bool = True
    """Also say which samples did that in a fourth, short run, on problems of all levels. Takes about half a minute."""
    seed: int = 0
    """Seed of everything random."""
    sae: SAEConfig = field(default_factory=lambda: SAEConfig(d_sae=256, k=8))
    """Shape of the T-SAE."""
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(tokens=1_500_000, batch_tokens=1024))
    """Its training."""

    def __post_init__(self) -> None:
        need_numbers(self)
        expand_paths(self)
        need_at_most(self, problems=10_000, samples=10_000, band_samples=10_000)
        for name in ("problems", "samples", "band_samples"):
            if getattr(self, name) < 1:
                raise TsaeError(f"{name}={getattr(self, name)} is less than 1", where="DemoConfig")
