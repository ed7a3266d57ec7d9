"""The commands that faults are injected into, and the small artefacts that they read."""

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
GIVEN = "series adapters mixed problems.jsonl"
"""Artefacts that a user brings: no checksum says what they held."""


@dataclass(frozen=True)
class Stage:
    """A command; its words and artefacts are divided by spaces."""

    name: str
    words: str
    """Paths are relative to the folder of the artefacts, and results go to "out"."""
    read: str = ""
    """Artefacts that are damaged for it."""
    open: str = ""
    """Artefacts of `GIVEN` that it knows nothing of, so that its results may differ where one is changed."""
    bound: str = ""
    """Artefacts that belong to the others: those of another run are refused."""
    begun: str = ""
    """Artefact that lies where the results go, and is completed or added to."""
    compared: str = "*"
    """Pattern of the results' names that it answers for."""
    disturbed: bool = False
    """Whether faults are injected while it writes."""

    @property
    def command(self) -> tuple[str, ...]:
        return tuple(self.words.split())

    @property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.read.split())

    @property
    def needs(self) -> tuple[str, ...]:
        """Artefacts that must be there."""
        first = {word.split("/")[0] for word in self.command}
        return tuple(name for name in ARTEFACTS if name in first)


_FEW = "--min-problems 5 --n-permutations 200 --n-bootstrap 100"
_SIZE = "--d-sae 32 --k 4 --batch-tokens 256"
_LIVE = "--live.series series --live.rollouts rollouts.parquet"
_VERIFY = "--verifier tsae.testbed.annotate:verify"
_SAMPLE = f"rollouts sample --series series --problems problems.jsonl --n-samples 4 --max-new-tokens 40 {_VERIFY}"
_CAPTURE = "capture --series series --rollouts rollouts.parquet --shard-tokens 1000"
_TRAIN = f"train --store acts --site {SITE}"
_ENCODE = "encode --sae sae --store acts"
_DIFFICULTY = "rollouts difficulty --rollouts raw.parquet --n-draws 100"
_REPORT = "report --diff diff --features features --attribution attribution --to out/page.html"
_CAUSAL = (
    "causal --series series --checkpoint hard-100 --sae sae --features features --choose 12 --problems problems.jsonl "
    f"{_VERIFY} --n-samples 2 --max-new-tokens 12 --n-random 1 --to out/causal"
)
_RUN = (
    "run mixed --tokens 4000 --d-sae 32 --k 4 --training-tokens 6000 --diff.n-permutations 100 --diff.n-bootstrap 100 "
    "--diff.noise-draws 1 --attribution.targets outcome --attribution.n-fixed 8 --attribution.groups outcome"
)
_ATTRIBUTE = (
    "attribute mixed --rollouts mixed.parquet --sae sae --targets features outcome --features 0 3 --n-fixed 8 "
    "--tokens-of 8 --groups outcome --to out/attribution"
)
_DIFF_MORE = (
    f"diff --features features --to out/diff {_FEW} --store acts --compare diff --sae sae --series series --tokenizer "
    "series/base --insertion 1 --noise-draws 1 --markdown out/diff.md"
)
_DEMO = (
    "demo --problems 4 --samples 4 --band-samples 8 --sae.d-sae 32 --sae.k 4 --training.tokens 6000 "
    "--training.batch-tokens 256 --to out/demo"
)

# fmt: off
STAGES = (
    Stage("sample", f"{_SAMPLE} --to out/raw.parquet", "series problems.jsonl", open=GIVEN, disturbed=True),
    Stage("bands", "rollouts bands --rollouts raw.parquet --to out/banded.parquet", "raw.parquet", disturbed=True),
    Stage("capture", f"{_CAPTURE} --token-statistics --to out/acts", "series rollouts.parquet", open=GIVEN,
          disturbed=True),
    Stage("train", f"{_TRAIN} --to out/sae {_SIZE} --tokens 2000", "acts", disturbed=True),
    Stage("encode", f"{_ENCODE} --to out/features", "sae acts", disturbed=True),
    Stage("diff", f"diff --features features --to out/diff {_FEW}", "features", disturbed=True),
    Stage("reinforcement-diff", "reinforcement --features features --diff diff --to out/pushed --n-permutations 100",
          "features diff", bound="diff", disturbed=True),
    Stage("causal", _CAUSAL, "series sae features problems.jsonl", open="problems.jsonl", bound="features sae",
          disturbed=True),
    Stage("attribute", _ATTRIBUTE, "mixed mixed.parquet sae", open=GIVEN, disturbed=True),
    Stage("credit", "credit fit --features features --to out/credit --min-problems 2 --q 1", "features",
          disturbed=True),
    Stage("influence", "influence --series series --rollouts rollouts.parquet --sae sae --features 3 --to "
          "out/influence", "series rollouts.parquet sae", open=GIVEN, disturbed=True),
    Stage("drift", "drift --series series --to out/drift", "series", open=GIVEN, disturbed=True),
    Stage("run", f"{_RUN} --to out/analysis", "mixed", open=GIVEN, disturbed=True),
    Stage("claims", "claims out/analysis", "out/analysis", begun="analysis", compared="*claims.json", disturbed=True),
    Stage("difficulty", f"{_DIFFICULTY} --json out/difficulty.json", "raw.parquet"),
    Stage("difficulty-page", f"{_DIFFICULTY} --series series --to out/difficulty", "raw.parquet series", open=GIVEN),
    Stage("behaviours", "rollouts behaviours --rollouts raw.parquet --to out/behaved.parquet --json out/behaved.json",
          "raw.parquet", disturbed=True),
    Stage("import", "rollouts import mixed --to out/mixed.parquet", "mixed", open=GIVEN),
    Stage("show", "store show acts --json out/show.json", "acts"),
    Stage("check", "verify acts --json out/check.json", "acts"),
    Stage("recapture", f"{_CAPTURE} --token-statistics --to out/acts", "out/acts series rollouts.parquet", begun="acts",
          compared="*.h5"),
    Stage("statistics", "store statistics acts --to out/statistics.parquet", "acts", disturbed=True),
    Stage("evaluate", "evaluate --sae sae --store acts --json out/found.json", "sae acts"),
    Stage("evaluate-more", "evaluate --sae out/sae --store acts --seeds sae-1 --baseline sae-1 --json out/found.json "
          "--series series", "out/sae acts sae-1 series", begun="sae"),
    Stage("train-start", f"{_TRAIN} --to out/sae --start sae --tokens 1000 --batch-tokens 256", "acts sae"),
    Stage("train-live", f"train {_LIVE} --to out/sae {_SIZE} --tokens 1000 --site {SITE}", "series rollouts.parquet",
          open=GIVEN),
    Stage("crosscoder", "crosscoder --store acts --reader hard-100 --to out/crosscoder --tokens 2000 "
          f"{_SIZE} --site {SITE}", "acts"),
    Stage("export", "export --sae sae --to out/exported", "sae", disturbed=True),
    Stage("push-folder", "push org/name sae --licence apache-2.0 --to-folder out/files", "sae", disturbed=True),
    Stage("encode-live", f"encode --sae sae {_LIVE} --to out/features", "series rollouts.parquet sae", open=GIVEN,
          disturbed=True),
    Stage("capture-adapters", "capture --series adapters --rollouts rollouts.parquet --to out/acts",
          "adapters rollouts.parquet", open=GIVEN),
    Stage("diff-more", _DIFF_MORE, "features acts sae diff series", bound="acts sae"),
    Stage("reinforcement", "reinforcement --features features --n-permutations 100 --json out/pushed.json", "features"),
    # It takes an attribution beside the diff by itself: named, so that it is laid out.
    Stage("report", _REPORT, "diff features attribution", bound="diff features"),
    Stage("report-more", f"{_REPORT} --causal causal --reinforcement pushed", "diff features causal pushed attribution",
          bound="diff features causal pushed", disturbed=True),
    Stage("report-run", "report --diff analysis/diff --features analysis/features --to out/page.html", "analysis"),
    Stage("explain", "explain diff --features features --n 6 --held-out 4 --to out/explanations", "diff features",
          bound="diff features", disturbed=True),
    Stage("export-delphi", "export --sae sae --features features --format delphi --model m --context 16 --to "
          "out/latents", "sae features", bound="sae features", disturbed=True),
    Stage("causal-store", f"{_CAUSAL} --store acts --raised hard-100 --lowered base", "acts features",
          bound="acts features"),
    Stage("weights", "credit weights --credit credit --features features --store acts --to out/weights.parquet",
          "credit features acts", bound="credit features acts", disturbed=True),
    Stage("reformulate", "reformulate problems.jsonl --to out/easier.jsonl", "problems.jsonl", open=GIVEN),
    Stage("demo", _DEMO, disturbed=True),
    Stage("sample-parts", f"{_SAMPLE} --batch-size 8 --to out/raw.parquet --parts 2 --workers 2", disturbed=True),
    Stage("capture-parts", f"{_CAPTURE} --to out/acts --parts 3 --workers 2", disturbed=True),
    Stage("encode-parts", f"{_ENCODE} --to out/features --parts 2 --workers 2", disturbed=True),
    Stage("train-long", f"{_TRAIN} --to out/sae {_SIZE} --tokens 8000 --save-every-steps 4", disturbed=True),
    Stage("train-seeds", f"{_TRAIN} --to out/saes {_SIZE} --tokens 3000 --seeds 0 1 --save-every-steps 4",
          disturbed=True),
)
# fmt: on
READERS = tuple(stage for stage in STAGES if stage.read)
WRITERS = tuple(stage for stage in STAGES if stage.disturbed)
BY_NAME = {stage.name: stage for stage in STAGES}
_LARGE = f"{_TRAIN} --to out/sae --d-sae 64 --k 4 --tokens 20000 --batch-tokens 512"
_MADE_BY = {
    "raw.parquet": "sample", "rollouts.parquet": "bands", "acts": "capture", "sae": _LARGE,
    "sae-1": f"{_LARGE} --seed 1", "features": "encode", "diff": "diff", "pushed": "reinforcement-diff",
    "causal": "causal", "mixed.parquet": "import", "attribution": "attribute", "credit": "credit",
    "influence": "influence", "analysis": "run", "drift": "drift",
}  # fmt: skip
MAKING = {name: tuple((BY_NAME[by].words if by in BY_NAME else by).split()) for name, by in _MADE_BY.items()}
"""The artefacts that commands make, in this order, and by which: what it writes to "out" becomes the artefact."""
IMPORTS: dict[str, tuple[str, ...]] = {
    "verl": (), "open-instruct": (), "nemo-rl": (), "prime-rl": (), "prime-rl-stream": ("--skip", "errored", "empty"),
    "prime-rl-tokens": (), "open-r1": (), "trl": ("--outcome", "digits", "--skip", "unscored"),
}  # fmt: skip


def importing(name: str, to: Path, log: Path, chat: Path) -> Sequence[str | Path]:
    """The words that import a trainer's log."""
    return ["rollouts", "import", log, "--to", to, "--checkpoint", chat, "--workers", "1", *IMPORTS[name]]
