"""lm-evaluation-harness: what it writes with ``--log_samples``, ``samples_{task}_{date}.jsonl``.

After the source of EleutherAI/lm-evaluation-harness (``evaluator.py``, ``loggers/evaluation_tracker.py``, 2026). A line
has doc_id, doc, target, arguments (the prompt and the sampling's), resps (a list of responses for each request), what a
filter extracted (filtered_resps), and each metric of `metrics` as a column. There is a line for every filter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entries.conversations import messages_of
from tsae.rollouts.logs.entries.entry import Entry, Unusable
from tsae.rollouts.logs.entries.fields import Fields
from tsae.rollouts.logs.entries.log_format import Format, each_response, each_row, has
from tsae.rollouts.logs.on_disk.log_files import LogFile


def _parse(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    # lm-eval itself calls a metric of a filter by this name: exact_match,strict-match.
    chosen = (config.outcome or "").partition(",")[2]

    def split(row: Fields) -> Iterable[Fields | Unusable]:
        nonlocal chosen
        chosen = chosen or str(row.get("filter") or "none")
        if row.get("filter") not in (None, chosen):
            return []
        answers = row.row["resps"][0]
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            return [row.unusable("empty", "has log-probabilities of choices, and no response")]
        return each_response(row.inside({**row.row, "response": answers}), "response", (), whole=row.row)

    return each_row(file, config, _entry, split)


def _entry(row: Fields) -> Entry:
    name, scores = str(row.get("filter") or "none"), {}
    # Before 0.4.5, metrics are not listed.
    for metric in row.get("metrics") or row.row:
        if isinstance(row.get(metric), (int, float)) and metric != "doc_id":
            # A metric is of the first response alone.
            value = None if row.index else row.score(metric)
            scores[metric if name == "none" else f"{metric},{name}"] = value
    asked = row.row["arguments"]
    prompt: Any = asked["gen_args_0"]["arg_0"] if isinstance(asked, Mapping) else asked[0][0]
    return Entry(
        row.where,
        prompt=messages_of(prompt) or row.inside({"prompt": prompt}).text("prompt"),
        prompt_is="verbatim",
        response=row.text("response"),
        rewards=scores,
        answer=row.answer("target"),
        assumed=None if name == "none" else f"are scored by the filter {name} (--outcome METRIC,FILTER for another)",
    )


FORMAT = Format(
    "lm-eval",
    "lm-eval samples",
    _parse,
    has("doc_id", "doc", "arguments", "resps", "filtered_resps"),
    re.compile(r"(^|/)samples_[^/]+\.jsonl$"),
    cut=False,
)
