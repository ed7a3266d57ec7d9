"""OpenRLHF: the output of its batch inference. A line is a response: input, output and, once scored, reward.

Read off OpenRLHF's ``cli/batch_inference.py`` (up to 0.10). Its PPO keeps one rollout a step, in Weights &
Biases or TensorBoard. To keep all, write them as JSON lines in the run's reward function or agent, which get the texts,
and name the columns.

- input is the prompt as the engine got it, after the chat template where one was applied.
- With vLLM, output has its special tokens, and so the end token of a response that ended by itself; without, it has
  none.
- There is no step, and all responses are one policy's: name it with ``--run``.
"""

from __future__ import annotations

from collections.abc import Iterator

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry, Row, Unusable, each_row, get, score, text
from tsae.rollouts.logs.files import LogFile


def fits(row: Row, config: ImportConfig) -> bool:
    return {"input", "output"} <= row.keys() <= {"input", "output", "reward"}


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        reward = score(row.get("reward"), "reward", where)
        yield Entry(
            where,
            prompt=text(get(row, "input", where), "input", where),
            prompt_is="verbatim",
            response=text(get(row, "output", where), "output", where),
            rewards={} if "reward" not in row else {"reward": reward},
            reward=reward,
            unscored="reward" in row and reward is None,
        )

    return each_row(file, config, of)
