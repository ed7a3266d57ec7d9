"""SkyRL: the evaluations that it writes, ``dumped_evals/global_step_{N}_evals/{data set}.jsonl``.

Read off SkyRL 0.3's ``train/evaluate.py`` and ``train/utils/trainer_utils.py``. A line has input_prompt,
output_response, score, stop_reason, env_class, env_extras and data_source. Training batches are pickles
(``dump_data_batch``), which are not read; evaluations are what SkyRL leaves in a form that can be.

- Texts are decoded with their special tokens. In an environment of several turns, what it said stands in the response
  and no mask says where.
- score is a number, or one a token, whose sum is the score.
- Step N is evaluated after N updates; ``eval_only`` has no step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import Entry, Row, Unusable, answer_text, each_row, get, label, mapping, score, text
from tsae.rollouts.logs.files import LogFile
from tsae.rollouts.logs.plain import finish

FILE = re.compile(
    r"(^|/)((?P<run>[^/]+)/)?dumped_evals/(global_step_(?P<step>\d+)_evals|eval_only)/(?!aggregated_results)[^/]+\.jsonl$"
)


def fits(row: Row, config: ImportConfig) -> bool:
    return {"input_prompt", "output_response", "score"} <= row.keys()


def read(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        total = _total(row["score"], where)
        extras = mapping(row, "env_extras", where)
        index = label(mapping(extras, "extra_info", where).get("index"), "index", where)
        yield Entry(
            where,
            prompt=text(get(row, "input_prompt", where), "input_prompt", where),
            prompt_is="rendered",
            response=text(get(row, "output_response", where), "output_response", where),
            response_rendered=True,
            rewards={"score": total},
            reward=total,
            unscored=total is None,
            answer=answer_text(mapping(extras, "reward_spec", where).get("ground_truth")),
            problem_id=None if index is None else f"{row.get('data_source')}/{index}",
            step=file.step,
            updates=file.step,
            finish_reason=finish(row.get("stop_reason")),
        )

    return each_row(file, config, of)


def _total(found: Any, where: str) -> float | None:
    if not isinstance(found, list):
        return score(found, "score", where)
    values = [score(value, "score", where) for value in found]
    return sum(value for value in values if value is not None) if values else None
