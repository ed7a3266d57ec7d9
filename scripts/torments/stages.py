"""The commands that are tormented, and the small artefacts that they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tsae

SITE = "blocks.1.hook_resid_post"
SHIPPED = Path(tsae.__file__).parent / "testbed" / "series"
LOGS = Path(__file__).resolve().parents[2] / "tests" / "logs"

ARTEFACTS = (
    "series", "adapters", "mixed", "mixed.parquet", "problems.jsonl", "raw.parquet", "rollouts.parquet", "acts", "sae",
    "sae-1", "features", "diff", "pushed", "causal", "attribution", "credit", "influence", "analysis", "drift",
)  # fmt: skip
"""In the folder of the artefacts, files and folders. A word of a command that begins with one of them is read."""
GIVEN = ("series", "adapters", "mixed", "problems.jsonl")
"""Artefacts that a user brings: no checksum says what they held."""


@dataclass(frozen=True)
class Stage:
    """A command."""

    name: str
    command: tuple[str, ...]
    """Its words; paths are relative to the folder of the artefacts, and results go to "out"."""
    reads: tuple[str, ...] = ()
    """Artefacts that are damaged for it."""
    open: tuple[str, ...] = ()
    """Artefacts of `GIVEN` that it knows nothing of, so that its results may differ where one is changed."""
    begun: str = ""
    """Artefact that lies where the results go, and is mended or added to."""
    compared: str = "*"
    """Pattern of the results' names that it answers for."""
    bound: tuple[str, ...] = ()
    """Artefacts that belong to the others: those of another run are refused."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Artefacts that must be there."""
        first = [word.split("/")[0] for word in self.command]
        return tuple(name for name in ARTEFACTS if name in first)


_SERIES = ("--series", "series")
_FEW = ("--min-problems", "5", "--n-permutations", "200", "--n-bootstrap", "100")
_TRAINING = ("--d-sae", "32", "--k", "4", "--batch-tokens", "256")
_LIVE = ("--live.series", "series", "--live.rollouts", "rollouts.parquet")
_VERIFIER = ("--verifier", "tsae.testbed.verifier:verify")
_SAMPLE = ("rollouts", "sample", *_SERIES, "--problems", "problems.jsonl", "--n-samples", "4", "--max-new-tokens", "40",
           *_VERIFIER)  # fmt: skip
_CAPTURE = ("capture", *_SERIES, "--rollouts", "rollouts.parquet", "--shard-tokens", "1000")
_ENCODE = ("encode", "--sae", "sae", "--store", "acts")
_CAUSAL = ("causal", *_SERIES, "--checkpoint", "hard-100", "--sae", "sae", "--features", "features", "--choose", "12",
           "--problems", "problems.jsonl", *_VERIFIER, "--n-samples", "2", "--max-new-tokens", "12", "--n-random",
           "1")  # fmt: skip
_ATTRIBUTE = ("attribute", "mixed", "--rollouts", "mixed.parquet", "--sae", "sae", "--targets", "features", "outcome",
              "--features", "0", "3", "--n-fixed", "8", "--tokens-of", "8", "--groups",
              "outcome")  # fmt: skip
_RUN = ("run", "mixed", "--tokens", "4000", "--d-sae", "32", "--k", "4", "--training-tokens", "6000",
        "--diff.n-permutations", "100", "--diff.n-bootstrap", "100", "--diff.noise-draws", "1",
        "--attribution.targets", "outcome", "--attribution.n-fixed", "8", "--attribution.groups",
        "outcome")  # fmt: skip

SAMPLE = Stage("sample", (*_SAMPLE, "--to", "out/raw.parquet"), ("series", "problems.jsonl"), open=GIVEN)
BANDS = Stage("bands", ("rollouts", "bands", "--rollouts", "raw.parquet", "--to", "out/banded.parquet"),
              ("raw.parquet",))  # fmt: skip
CAPTURE = Stage("capture", (*_CAPTURE, "--token-statistics", "--to", "out/acts"), ("series", "rollouts.parquet"),
                open=GIVEN)  # fmt: skip
TRAIN = Stage("train", ("train", "--store", "acts", "--to", "out/sae", *_TRAINING, "--tokens", "2000", "--site", SITE),
              ("acts",))  # fmt: skip
ENCODE = Stage("encode", (*_ENCODE, "--to", "out/features"), ("sae", "acts"))
DIFF = Stage("diff", ("diff", "--features", "features", "--to", "out/diff", *_FEW), ("features",))
PUSHED = Stage("reinforcement-diff", ("reinforcement", "--features", "features", "--diff", "diff", "--to", "out/pushed",
                                      "--n-permutations", "100"), ("features", "diff"), bound=("diff",))  # fmt: skip
CAUSAL = Stage(
    "causal",
    (*_CAUSAL, "--to", "out/causal"),
    ("series", "sae", "features", "problems.jsonl"),
    open=("problems.jsonl",),
    bound=("features", "sae"),
)
ATTRIBUTE = Stage("attribute", (*_ATTRIBUTE, "--to", "out/attribution"), ("mixed", "mixed.parquet", "sae"), open=GIVEN)
CREDIT = Stage("credit", ("credit", "fit", "--features", "features", "--to", "out/credit", "--min-problems", "2",
                          "--q", "1"), ("features",))  # fmt: skip
INFLUENCE = Stage("influence", ("influence", *_SERIES, "--rollouts", "rollouts.parquet", "--sae", "sae", "--features",
                                "3", "--to", "out/influence"), ("series", "rollouts.parquet", "sae"),
                  open=GIVEN)  # fmt: skip
DRIFT = Stage("drift", ("drift", *_SERIES, "--to", "out/drift"), ("series",), open=GIVEN)
RUN = Stage("run", (*_RUN, "--to", "out/analysis"), ("mixed",), open=GIVEN)
CLAIMS = Stage("claims", ("claims", "out/analysis"), ("out/analysis",), begun="analysis", compared="*claims.json")

READERS = (
    SAMPLE, BANDS, CAPTURE, TRAIN, ENCODE, DIFF, PUSHED, CAUSAL, ATTRIBUTE, CREDIT, INFLUENCE, DRIFT, RUN,
    Stage("difficulty", ("rollouts", "difficulty", "--rollouts", "raw.parquet", "--n-draws", "100",
                         "--json", "out/difficulty.json"), ("raw.parquet",)),
    Stage("difficulty-page", ("rollouts", "difficulty", "--rollouts", "raw.parquet", "--n-draws", "100", *_SERIES,
                              "--to", "out/difficulty"), ("raw.parquet", "series"), open=GIVEN),
    Stage("behaviours", ("rollouts", "behaviours", "--rollouts", "raw.parquet", "--to", "out/behaved.parquet",
                         "--json", "out/behaved.json"), ("raw.parquet",)),
    Stage("import", ("rollouts", "import", "mixed", "--to", "out/mixed.parquet"), ("mixed",), open=GIVEN),
    Stage("show", ("store", "show", "acts", "--json", "out/show.json"), ("acts",)),
    Stage("check", ("store", "check", "acts", "--json", "out/check.json"), ("acts",)),
    Stage("repair", ("store", "check", "out/acts", "--repair", *_SERIES), ("out/acts", "series"), begun="acts",
          compared="*.h5"),
    Stage("statistics", ("store", "statistics", "acts", "--to", "out/statistics.parquet"), ("acts",)),
    Stage("evaluate", ("evaluate", "--sae", "sae", "--store", "acts", "--json", "out/found.json"), ("sae", "acts")),
    Stage("evaluate-more", ("evaluate", "--sae", "out/sae", "--store", "acts", "--seeds", "sae-1", "--baseline",
                            "sae-1", "--json", "out/found.json", *_SERIES),
          ("out/sae", "acts", "sae-1", "series"), begun="sae"),
    Stage("train-start", ("train", "--store", "acts", "--to", "out/sae", "--start", "sae", "--tokens", "1000",
                          "--batch-tokens", "256", "--site", SITE), ("acts", "sae")),
    Stage("train-live", ("train", *_LIVE, "--to", "out/sae", *_TRAINING, "--tokens", "1000", "--site", SITE),
          ("series", "rollouts.parquet"), open=GIVEN),
    Stage("crosscoder", ("crosscoder", "--store", "acts", "--reader", "hard-100", "--to", "out/crosscoder", *_TRAINING,
                         "--tokens", "2000", "--site", SITE), ("acts",)),
    Stage("export", ("export", "--sae", "sae", "--to", "out/exported"), ("sae",)),
    Stage("push-folder", ("push", "org/name", "sae", "--licence", "apache-2.0", "--to-folder", "out/files"), ("sae",)),
    Stage("encode-live", ("encode", "--sae", "sae", *_LIVE, "--to", "out/features"),
          ("series", "rollouts.parquet", "sae"), open=GIVEN),
    Stage("capture-adapters", ("capture", "--series", "adapters", "--rollouts", "rollouts.parquet", "--to", "out/acts"),
          ("adapters", "rollouts.parquet"), open=GIVEN),
    Stage("diff-more", ("diff", "--features", "features", "--to", "out/diff", *_FEW, "--store", "acts", "--compare",
                        "diff", "--sae", "sae", *_SERIES, "--tokenizer", "series/base", "--insertion", "1",
                        "--noise-draws", "1", "--markdown", "out/diff.md"),
          ("features", "acts", "sae", "diff", "series"), bound=("acts", "sae")),
    Stage("reinforcement", ("reinforcement", "--features", "features", "--n-permutations", "100",
                            "--json", "out/pushed.json"), ("features",)),
    # It takes an attribution beside the diff by itself: named, so that it is laid out.
    Stage("report", ("report", "--diff", "diff", "--features", "features", "--attribution", "attribution",
                     "--to", "out/page.html"),
          ("diff", "features", "attribution"), bound=("diff", "features")),
    Stage("explain", ("explain", "diff", "--features", "features", "--n", "6", "--held-out", "4", "--to",
                      "out/explanations"), ("diff", "features"), bound=("diff", "features")),
    Stage("export-delphi", ("export", "--sae", "sae", "--features", "features", "--format", "delphi", "--model", "m",
                            "--context", "16", "--to", "out/latents"), ("sae", "features"), bound=("sae", "features")),
    Stage("report-more", ("report", "--diff", "diff", "--features", "features", "--causal", "causal", "--reinforcement",
                          "pushed", "--attribution", "attribution", "--to", "out/page.html"),
          ("diff", "features", "causal", "pushed", "attribution"),
          bound=("diff", "features", "causal", "pushed")),
    Stage("causal-store", (*_CAUSAL, "--store", "acts", "--raised", "hard-100", "--lowered", "base", "--to",
                           "out/causal"), ("acts", "features"), bound=("acts", "features")),
    Stage("weights", ("credit", "weights", "--credit", "credit", "--features", "features", "--store", "acts", "--to",
                      "out/weights.parquet"), ("credit", "features", "acts"), bound=("credit", "features", "acts")),
    CLAIMS,
    Stage("report-run", ("report", "--diff", "analysis/diff", "--features", "analysis/features", "--to",
                         "out/page.html"), ("analysis",)),
    Stage("reformulate", ("reformulate", "problems.jsonl", "--to", "out/easier.jsonl"), ("problems.jsonl",),
          open=GIVEN),
)  # fmt: skip
WRITERS = (
    SAMPLE, BANDS, CAPTURE, TRAIN, ENCODE, DIFF, PUSHED, CAUSAL, ATTRIBUTE, CREDIT, INFLUENCE, DRIFT, RUN, CLAIMS,
    Stage("demo", ("demo", "--problems", "4", "--samples", "4", "--band-samples", "8", "--sae.d-sae", "32",
                   "--sae.k", "4", "--training.tokens", "6000", "--training.batch-tokens", "256", "--to", "out/demo")),
    Stage("sample-parts", (*_SAMPLE, "--batch-size", "8", "--to", "out/raw.parquet", "--parts", "2", "--workers", "2")),
    Stage("capture-parts", (*_CAPTURE, "--to", "out/acts", "--parts", "3", "--workers", "2")),
    Stage("encode-parts", (*_ENCODE, "--to", "out/features", "--parts", "2", "--workers", "2")),
    Stage("train-long", ("train", "--store", "acts", "--to", "out/sae", *_TRAINING, "--tokens", "8000",
                         "--save-every-steps", "4", "--site", SITE)),
    Stage("train-seeds", ("train", "--store", "acts", "--to", "out/saes", *_TRAINING, "--tokens", "3000", "--seeds",
                          "0", "1", "--save-every-steps", "4", "--site", SITE)),
    *(stage for stage in READERS
      if stage.name in ("report-more", "export", "export-delphi", "explain", "push-folder", "weights", "encode-live",
                        "behaviours", "statistics")),
)  # fmt: skip
"""Commands that are disturbed while they write."""
STAGES = tuple({stage.name: stage for stage in (*READERS, *WRITERS)}.values())
BY_NAME = {stage.name: stage for stage in STAGES}

MAKING: Sequence[tuple[str, tuple[str, ...]]] = (
    ("raw.parquet", SAMPLE.command),
    ("rollouts.parquet", BANDS.command),
    ("acts", CAPTURE.command),
    ("sae", ("train", "--store", "acts", "--to", "out/sae", "--d-sae", "64", "--k", "4", "--tokens", "20000",
             "--batch-tokens", "512", "--site", SITE)),
    ("sae-1", ("train", "--store", "acts", "--to", "out/sae", "--d-sae", "64", "--k", "4", "--tokens", "20000",
               "--batch-tokens", "512", "--site", SITE, "--seed", "1")),
    ("features", ENCODE.command),
    ("diff", DIFF.command),
    ("pushed", PUSHED.command),
    ("causal", CAUSAL.command),
    ("mixed.parquet", ("rollouts", "import", "mixed", "--to", "out/mixed.parquet")),
    ("attribution", ATTRIBUTE.command),
    ("credit", CREDIT.command),
    ("influence", INFLUENCE.command),
    ("analysis", RUN.command),
    ("drift", DRIFT.command),
)  # fmt: skip
"""The artefacts that commands make, in this order, and by which: what it writes to "out" becomes the artefact."""
IMPORTS: dict[str, tuple[str, ...]] = {
    "verl": (), "open-instruct": (), "nemo-rl": (), "prime-rl": (), "prime-rl-stream": ("--skip", "errored", "empty"),
    "prime-rl-tokens": (), "open-r1": (), "trl": ("--outcome", "digits", "--skip", "unscored"),
}  # fmt: skip


def importing(name: str, to: Path, options: Sequence[str], log: Path, chat: Path) -> list[str | Path]:
    """The words that import a trainer's log."""
    return ["rollouts", "import", log, "--to", to, "--checkpoint", chat, "--workers", "1", *options]
