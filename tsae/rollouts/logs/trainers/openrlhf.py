"""OpenRLHF: the output of its batch inference. A line is a response: input, output and, once scored, reward.

After the source of OpenRLHF up to 0.10 (``cli/batch_inference.py``). Its PPO keeps one rollout a step, in Weights &
Biases or TensorBoard. To keep all, write them as JSON lines in the run's reward function or agent, which get the texts,
and name the columns.
"""

from __future__ import annotations

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.fields import Fields, Row
from tsae.rollouts.logs.entries.log_format import Format, by_row


def _fits(row: Row, config: ImportConfig) -> bool:
    return {"input", "output"} <= row.keys() <= {"input", "output", "reward"}


def _entry(row: Fields) -> Entry:
    return Entry(
        row.where,
        prompt=row.text("input"),
        prompt_is="verbatim",
        response=row.text("output"),
        rewards={"reward": row.score("reward")} if "reward" in row else {},
    )


FORMAT = Format("openrlhf", "OpenRLHF batch inference", by_row(_entry), _fits)
