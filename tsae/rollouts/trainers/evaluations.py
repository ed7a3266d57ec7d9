"""Evaluations and batch inference: Inspect, lm-evaluation-harness, SkyRL, OpenRLHF.

Inspect: evaluations as ``.eval`` files, through inspect_ai's own code (``pip install 'tsae[inspect]'``).

After the source of inspect_ai 0.3 (``log/_log.py``). A sample has id, epoch, input, target, messages, output and
scores; the model is the log's.

lm-evaluation-harness: what it writes with ``--log_samples``, ``samples_{task}_{date}.jsonl``.

After the source of EleutherAI/lm-evaluation-harness (``evaluator.py``, ``loggers/evaluation_tracker.py``, 2026). A line
has doc_id, doc, target, arguments (the prompt and the sampling's), resps (a list of responses for each request), what a
filter extracted (filtered_resps), and each metric of `metrics` as a column. There is a line for every filter.

SkyRL: the evaluations that it writes, ``dumped_evals/global_step_{N}_evals/{data set}.jsonl``.

After the source of SkyRL 0.3 (``train/evaluate.py`` and ``train/utils/trainer_utils.py``). A line has input_prompt,
output_response, score, stop_reason, env_class, env_extras and data_source. Training batches are pickles
(``dump_data_batch``), which are not read.

OpenRLHF: the output of its batch inference. A line is a response: input, output and, once scored, reward.

After the source of OpenRLHF up to 0.10 (``cli/batch_inference.py``). Its PPO keeps one rollout a step, in Weights &
Biases or TensorBoard. To keep all, write them as JSON lines in the run's reward function or agent, which get the texts,
and name the columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.adapters import (
    Format,
    asked,
    by_row,
    each_response,
    each_row,
    is_conversation,
    messages_of,
    only_answer,
)
from tsae.rollouts.logs.entry import Entry, Fields, Unusable, read_number, total
from tsae.rollouts.logs.log_files import LogFile

_GRADES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
_STOPS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "max_tokens": "length", "model_length": "length"}


def _inspect_entry(row: Fields) -> Entry:
    if row.get("error") is not None:
        row.leave_out("errored", "the sample ended with an error")
    messages = row.need("messages")
    first = next((i for i, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    if not is_conversation(messages[:first]):
        row.leave_out("empty", "has no messages before its answer")
    choices = row.need("output").get("choices") or [{}]
    graded = {name: _graded(found) for name, found in (row.get("scores") or {}).items()}
    found = row.inside(graded).scores()
    scores = {name: value for name, value in found.items() if value is not None}
    task = row.row.get("task", "")
    return Entry(
        row.where,
        prompt=asked(messages[:first], row),
        response=only_answer(messages[first:], row),
        rewards=dict(scores),
        unscored=not scores,
        answer=row.answer("target"),
        problem_id=f"{task}/{row.row['id']}",
        policy=row.config.run or str(row.row.get("model", "unknown")),
        finish_reason=_STOPS.get(str(choices[0].get("stop_reason"))),
        key=f"{task}/{row.row['id']}/{row.row['epoch']}",
    )


def _graded(found: Any) -> float | None:
    """A score as a number; None for a text or several values."""
    value = found.get("value") if isinstance(found, Mapping) else found
    if isinstance(value, str):
        value = _GRADES.get(value, read_number(value))
    return float(value) if isinstance(value, (bool, int, float)) else None


INSPECT = Format("inspect", by_row(_inspect_entry))


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

    return each_row(file, config, _lm_eval_entry, split)


def _lm_eval_entry(row: Fields) -> Entry:
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


LM_EVAL = Format("lm-eval", _parse)


def _skyrl_entry(row: Fields) -> Entry:
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


SKYRL = Format("skyrl", by_row(_skyrl_entry))


def _openrlhf_entry(row: Fields) -> Entry:
    return Entry(
        row.where,
        prompt=row.text("input"),
        prompt_is="verbatim",
        response=row.text("output"),
        rewards={"reward": row.score("reward")} if "reward" in row else {},
    )


OPENRLHF = Format(
    "openrlhf",
    by_row(_openrlhf_entry),
    lambda row, config: {"input", "output"} <= row.keys() <= {"input", "output", "reward"},
)
