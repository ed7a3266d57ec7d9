"""The logs that can be imported: versions, settings, and what each log holds. Imports nothing heavy."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Literal, NamedTuple

LogFormat = Literal[
    "auto", "tsae", "trl", "verl", "open-instruct", "nemo-rl", "prime-rl", "prime-rl-tokens", "open-r1", "ms-swift",
    "slime", "areal", "roll", "verifiers", "rllm", "skyrl", "openrlhf", "inspect", "lm-eval", "atropos", "plain",
]  # fmt: skip
"""Names for --format."""

TELLS = ("prompt ids", "response ids", "log-probabilities", "advantages", "ends", "answers", "steps", "policies")
"""What a log may tell about a trajectory: token ids of prompt and response, log-probabilities of sampled tokens, the
advantage that was used, whether the response ended by itself or was cut, a reference answer, the trainer's step, and
the number of updates of the weights that sampled it."""
_IDS, _TIME = ("prompt ids", "response ids", "ends"), ("steps", "policies")
_NAMES = {name.replace(" ", "_").replace("-", "_"): name for name in TELLS}


def _tells(*names: str, **sometimes: str) -> dict[str, str]:
    """What a log tells, each with when: always (yes), or `sometimes`."""
    return dict.fromkeys(names, "yes") | {_NAMES[name]: when for name, when in sometimes.items()}


_ATROPOS = _tells(*_IDS, log_probabilities="later", advantages="if switched on")


class Known(NamedTuple):
    """A trainer's log."""

    module: str
    """Its adapter, in `tsae.rollouts.trainers`."""
    formats: tuple[str, ...]
    """Names for --format."""
    trainer: str
    versions: str
    """Versions whose logs, or whose source, were studied."""
    setting: str
    """What users switch on; empty if it is written anyway."""
    lacks: str
    """What the log does not hold."""
    tells: Mapping[str, str]
    """What it holds of `TELLS`, each with when: yes, or for which logs."""


KNOWN = (
    Known(
        "tsae_log",
        ("tsae",),
        "any trainer, with tsae.rl",
        "TRL 1.16; any loop with RunLog",
        "tsae.rl.TsaeCallback(trainer)",
        "",
        _tells(*_IDS, "advantages", *_TIME, log_probabilities="vLLM", answers="of the data set"),
    ),
    Known(
        "trl",
        ("trl",),
        "TRL, Unsloth",
        "0.15 to 1.x: Parquet, tables of wandb, trackio",
        'log_completions=True, logging_steps=1; log_extra("completion_ids", completion_ids) in a reward function',
        "ids of responses without that; the template's arguments, the rewards' weights",
        _tells(*_TIME, advantages="since 0.19", **dict.fromkeys(("response_ids", "ends", "answers"), "if switched on")),
    ),
    Known(
        "verl",
        ("verl",),
        "verl",
        "0.7 to 0.9, validation dumps, mlflow's val_step*.json",
        "trainer.rollout_data_dir",
        "ids, the end of a response, which tokens are a tool's",
        _tells("answers", *_TIME),
    ),
    Known(
        "open_instruct",
        ("open-instruct",),
        "open-instruct",
        "2026",
        "--save_traces",
        "",
        _tells(*_IDS, "advantages", "answers", *_TIME, log_probabilities="later"),
    ),
    Known("nemo_rl", ("nemo-rl",), "NeMo-RL", "2026", "", "", _tells(*_IDS, "log-probabilities", "advantages", *_TIME)),
    Known(
        "prime_rl",
        ("prime-rl", "prime-rl-tokens"),
        "prime-rl",
        "0.6 to 0.8, token exports",
        "",
        "rewards, in the newest token exports",
        _tells(*_IDS, "log-probabilities", "steps", advantages="mostly", answers="traces", policies="traces"),
    ),
    Known(
        "plain",
        ("open-r1",),
        "open-r1, tables with a row a problem",
        "data sets of generations; lists of responses and rewards",
        "",
        "ids, the system prompt, policy, step",
        _tells("answers", ends="OpenR1-Math"),
    ),
    Known(
        "ms_swift",
        ("ms-swift",),
        "ms-swift",
        "3.2 to 4.6, Megatron, Ray",
        "--log_completions --logging_steps 1",
        "ids, ends of responses, the rewards' weights",
        _tells("advantages", *_TIME, answers="solution"),
    ),
    Known(
        "slime",
        ("slime",),
        "slime",
        "2026",
        "--save-debug-rollout-data or --dump-details",
        "advantages",
        _tells(*_IDS, "answers", *_TIME, log_probabilities="later"),
    ),
    Known(
        "areal",
        ("areal",),
        "AReaL",
        "1.0.4",
        "rollout.dump_to_file",
        "ids, answers, advantages",
        _tells("ends", *_TIME),
    ),
    Known("roll", ("roll",), "ROLL", "2026", "rollout_dump_dir", "ids, ends of responses", _tells("answers", *_TIME)),
    Known(
        "prime_rl",
        ("verifiers",),
        "verifiers, prime-rl before 0.7",
        "0.1.3 to 0.2.1",
        "",
        "ids, tools, several turns",
        _tells("ends", "answers", advantages="prime-rl", steps="prime-rl", policies="prime-rl"),
    ),
    Known(
        "rllm",
        ("rllm",),
        "rLLM",
        "2026",
        "the episode logger",
        "ids, several steps",
        _tells("answers", *_TIME, ends="if cut"),
    ),
    Known(
        "evaluations",
        ("skyrl",),
        "SkyRL",
        "0.3, evaluations",
        "dump_eval_results",
        "batches of the training, which are pickles and not read",
        _tells("ends", "answers", *_TIME),
    ),
    Known("evaluations", ("openrlhf",), "OpenRLHF", "to 0.10, batch inference", "", "step and policy", _tells()),
    Known(
        "evaluations",
        ("inspect",),
        "Inspect",
        "0.3 (extra inspect)",
        "",
        "ids, step",
        _tells("ends", "answers", "policies"),
    ),
    Known(
        "evaluations",
        ("lm-eval",),
        "lm-evaluation-harness",
        "0.4, text tasks",
        "--log_samples",
        "ids, step",
        _tells("answers"),
    ),
    Known(
        "atropos", ("atropos",), "Atropos", "2026", "--env.data_path_to_save_groups", "step, policy, answers", _ATROPOS
    ),
    Known(
        "plain",
        ("plain",),
        "any other",
        "JSON lines, Parquet, JSON, CSV, TSV, Arrow, folders of save_to_disk",
        "--column prompt=NAME --column response=NAME",
        "what has no column",
        _tells(**dict.fromkeys(_NAMES, "a column")),
    ),
)


def formats_text(width: int = 100) -> str:
    """The table of docs/logs.md for a terminal."""
    parts = []
    for known in KNOWN:
        parts.append(f"{known.trainer} ({known.versions}): --format {', '.join(known.formats)}")
        told = ", ".join(name if when == "yes" else f"{name} ({when})" for name, when in known.tells.items())
        for label, text in (("switch on", known.setting), ("tells", told), ("lacks", known.lacks)):
            if text:
                parts.append(textwrap.fill(f"{label}: {text}", width, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(parts)
