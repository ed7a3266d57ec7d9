"""SkyRL: the evaluations that it writes, ``dumped_evals/global_step_{N}_evals/{data set}.jsonl``.

After the source of SkyRL 0.3 (``train/evaluate.py`` and ``train/utils/trainer_utils.py``). A line has input_prompt,
output_response, score, stop_reason, env_class, env_extras and data_source. Training batches are pickles
(``dump_data_batch``), which are not read.
"""

from __future__ import annotations

import re

from tsae.rollouts.logs.entries.entry import Entry, total
from tsae.rollouts.logs.entries.fields import Fields
from tsae.rollouts.logs.entries.log_format import Format, by_row, has


def _entry(row: Fields) -> Entry:
    extras = row.object("env_extras")
    index = extras.object("extra_info").label("index")
    return Entry(
        row.where,
        prompt=row.text("input_prompt"),
        prompt_is="rendered",
        response=row.text("output_response"),
        response_rendered=True,
        rewards={"score": _score(row)},
        answer=extras.object("reward_spec").answer("ground_truth"),
        problem_id=None if index is None else f"{row.get('data_source')}/{index}",
        step=row.file.step,
        updates=row.file.step,
        finish_reason=row.finish("stop_reason"),
    )


def _score(row: Fields) -> float | None:
    found = row.row["score"]
    if not isinstance(found, list):
        return row.score("score")
    values = [row.inside({"score": value}).score("score") for value in found]
    return total({str(turn): value for turn, value in enumerate(values)})


FORMAT = Format(
    "skyrl",
    "SkyRL evaluations",
    by_row(_entry),
    has("input_prompt", "output_response", "score"),
    re.compile(
        r"(^|/)((?P<run>[^/]+)/)?dumped_evals/(global_step_(?P<step>\d+)_evals|eval_only)/(?!aggregated_results)[^/]+\.jsonl$"
    ),
)
