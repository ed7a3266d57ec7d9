"""Whose logs are read, in which versions, and what each cannot tell. Imports nothing heavy: the command line asks."""

from __future__ import annotations

import textwrap
from typing import NamedTuple


class Known(NamedTuple):
    """A trainer's log."""

    formats: tuple[str, ...]
    """Names for --format."""
    trainer: str
    versions: str
    """Those whose logs, or the source that writes them, were read."""
    setting: str
    """What users switch on; empty where it is written anyway."""
    lacks: str
    """What the log does not hold."""


KNOWN = (
    Known(
        ("trl",),
        "TRL, Unsloth",
        "Parquet of TRL 1.x",
        'log_completions=True; log_extra("completion_ids", completion_ids) in a reward function',
        "ids of responses without that; the template's arguments, the rewards' weights",
    ),
    Known(
        ("verl",),
        "verl",
        "0.7 to 0.9, validation dumps",
        "trainer.rollout_data_dir",
        "ids, the end of a response, which tokens are a tool's",
    ),
    Known(("open-instruct",), "open-instruct", "2026", "--save_traces", ""),
    Known(("nemo-rl",), "NeMo-RL", "2026", "", ""),
    Known(
        ("prime-rl", "prime-rl-tokens"),
        "prime-rl",
        "0.6 to 0.8, token exports",
        "",
        "rewards, in the newest token exports",
    ),
    Known(("open-r1",), "open-r1", "data sets of generations", "", "ids, the system prompt, policy, step"),
    Known(
        ("ms-swift",),
        "ms-swift",
        "3.2 to 4.6, Megatron, Ray",
        "--log_completions",
        "ids, ends of responses, the rewards' weights",
    ),
    Known(("slime",), "slime", "2026", "--save-debug-rollout-data or --dump-details", "advantages"),
    Known(("areal",), "AReaL", "1.0.4", "rollout.dump_to_file", "ids, answers, advantages"),
    Known(("roll",), "ROLL", "2026", "rollout_dump_dir", "ids, ends of responses"),
    Known(("verifiers",), "verifiers, prime-rl before 0.7", "0.1.3 to 0.1.14", "", "ids, tools, several turns"),
    Known(("rllm",), "rLLM", "2026", "the episode logger", "ids, several steps"),
    Known(
        ("skyrl",),
        "SkyRL",
        "0.3, evaluations",
        "dump_eval_results",
        "batches of the training, which are pickles and not read",
    ),
    Known(("openrlhf",), "OpenRLHF", "to 0.10, batch inference", "", "step and policy"),
    Known(("inspect",), "Inspect", "0.3 (extra inspect)", "", "ids, step"),
    Known(
        ("plain",),
        "any other",
        "JSON lines, Parquet",
        "--column prompt=NAME --column response=NAME",
        "what has no column",
    ),
)


def formats_table() -> str:
    """The table of docs/logs.md, in Markdown."""
    lines = ["| trainer | `--format` | versions read | what to switch on | what the log lacks |", "| --- " * 5 + "|"]
    for known in KNOWN:
        cells = [known.trainer, ", ".join(known.formats), known.versions, known.setting, known.lacks]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def formats_text(width: int = 100) -> str:
    """The same for a terminal."""
    parts = []
    for known in KNOWN:
        parts.append(f"{known.trainer} ({known.versions}): --format {', '.join(known.formats)}")
        for label, text in (("switch on", known.setting), ("lacks", known.lacks)):
            if text:
                parts.append(textwrap.fill(f"{label}: {text}", width, initial_indent="  ", subsequent_indent="    "))
    return "\n".join(parts)
