"""prime-rl: the traces of its orchestrator, and the opt-in token exports of its trainer; verifiers.

After the source of PrimeIntellect-ai/prime-rl and verifiers (v1 traces, July to September 2026):

- ``rollouts/step_N/{train,eval}/{all,effective}/traces.jsonl`` (since pull request 2983). A line is a trace with
  kind, group_id and policy_version, or, later, an episode with its traces, group and run. ``effective`` repeats
  what is in ``all``: `ImportConfig.subset` picks one.
- ``monitors/file/traces/stream.jsonl`` (since pull request 3444) holds every episode once, also those that filters
  dropped; which of them were effective is in annotations that are not read.
- ``token_exports/step_N/rank_R.jsonl``: per-token arrays of what the trainer trained on, schema 1. First an object a
  token (id, loss_mask, advantage, reward), then arrays with export_step, run_id and rewards; later with step only and
  without rewards, so that outcomes are unknown.

verifiers before its traces, and prime-rl before 0.7, write a line a rollout, with prompt and completion as messages.
After the source of verifiers 0.1.14 (``utils/save_utils.py``) and of prime-rl 0.6 (its orchestrator). prime-rl writes
``rollouts/step_{N}/train_rollouts.jsonl``, an evaluation of verifiers ``results.jsonl``. A line has example_id, task,
prompt, completion, answer, info, reward, error, is_truncated, stop_condition and metrics, and each metric again as a
column; prime-rl adds env_name, policy_version, off_policy_steps, advantage and is_filtered.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from tsae.rollouts.logs.adapters import (
    Format,
    asked,
    by_row,
    is_conversation,
    logprobs_of,
    masked_entry,
    mean_advantage,
    only_answer,
    split_by_mask,
)
from tsae.rollouts.logs.entry import Entry, Fields, Row, is_score, total

_CUT_OFF = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")
_EPISODE = "tsae:episode"
"""Where `_split` puts the episode of a trace."""


def _work(episode: Fields) -> Fields:
    run = episode.object("run")
    return run.object("work") if "work" in run else run


def _split(row: Fields) -> Iterator[Fields]:
    """The traces of an episode; a trace that stands alone is its own episode."""
    # A stream holds work of both kinds; elsewhere the folder has been chosen.
    match, wanted = TRACES.named(row.file.name), row.config.subset.split("/")[0]
    streamed = match is None or match["subset"] is None
    if streamed and row.row.get("kind", _work(row).row.get("type", wanted)) != wanted:
        return
    traces = row.row.get("traces", [row.row])
    if not traces:
        row.leave_out("errored", "the episode failed before it had a trace")
    for trace in traces:
        yield row.inside({**trace, _EPISODE: row})


def _trace_entry(trace: Fields) -> Entry | None:
    agent, episode = trace.object("agent"), trace.row[_EPISODE]
    if "trainable" in agent and not agent.truth("trainable"):
        return None
    if not trace.row.get("ok", not (trace.get("errors") or trace.get("error"))):
        trace.leave_out("errored", "the rollout ended with an error")
    nodes, work = _path(trace), _work(episode)
    silent = [node for node in nodes if node.get("token_ids") is None]
    if 0 < len(silent) < len(nodes):
        trace.refuse(
            f"{len(silent)} of its {len(nodes)} messages have no token ids: what the policy read is not known whole",
            "Correct or drop that line.",
        )
    ids = [node.ids("token_ids") for node in nodes if node.get("token_ids")]
    mask = [node.marks("mask") for node in nodes if node.get("mask")]
    if not ids:
        trace.refuse(
            "its messages have no token ids: they were sampled from an API, not from a policy in training",
            "Give traces of training, or write the texts into a plain log.",
        )
    sampled = np.concatenate(mask) if mask else np.zeros(0, dtype=bool)
    prompt, response, inside = split_by_mask(np.concatenate(ids), sampled, trace)
    before = takewhile(lambda node: not any(node.get("mask") or []), nodes)
    per_token = [a for node in nodes for a in node.get("advantages") or [] if a is not None]
    advantage, varies = mean_advantage(per_token, trace) if per_token else (trace.number("advantage"), False)
    rewards = _rewards(trace.object("rewards"))
    info = trace.object("info")
    groups = (row.get("group_id") for row in (trace, episode, info))
    versions = (work.object("policy").get("start"), episode.get("policy_version"), info.get("policy_version"))
    version = next((found for found in versions if found is not None), None)
    task = (trace if "task" in trace else episode).object("task")
    data = task.object("data") if "data" in task else task
    columns = trace.config.columns
    return Entry(
        trace.where,
        prompt=[node.row["message"] for node in before if isinstance(node.get("message"), dict)],
        prompt_ids=prompt,
        response_ids=response,
        sampled=inside,
        masked=frozenset({"response"}),
        rewards=rewards,
        reward=total(rewards),
        unscored=total(rewards) is None,
        answer=data.answer(columns.answer),
        level=data.label(columns.level),
        problem_id=_problem(task, episode),
        step=trace.file.step if trace.file.step is not None else work.whole("step"),
        updates=trace.inside({"policy_version": version}).whole("policy_version"),
        advantage=advantage,
        advantage_varies=varies,
        group=next((str(group) for group in groups if isinstance(group, (str, int))), None),
        logprobs=logprobs_of([value for node in nodes for value in node.get("logprobs") or []], response),
        template={"tools": tools} if (tools := trace.get("tools")) else {},
        finish_reason=_finish(trace, nodes),
        key=trace.label("id"),
        extra=replace(data, source=None).kept(),
    )


def _path(trace: Fields) -> list[Fields]:
    """The messages from the root to the only leaf."""
    nodes = trace.need("nodes")
    parents = [node.get("parent") for node in nodes]
    if any(p is not None and not 0 <= p < i for i, p in enumerate(parents)):
        trace.refuse("a node's parent does not come before it", "Correct that line.")
    # A graph without branches lists its messages in order.
    if parents != [None, *range(len(nodes) - 1)]:
        trace.leave_out("multi-turn", "the messages branch into several conversations")
    return [trace.inside(node) for node in nodes]


def _rewards(logged: Fields) -> dict[str, float | None]:
    rewards: dict[str, float | None] = {}
    for name, value in logged.row.items():
        if isinstance(value, Mapping):
            found = logged.inside({name: value.get("score")}).score(name)
            weight = logged.inside({name: value.get("weight", 1.0)}).number(name)
            rewards[name] = None if found is None or weight is None else found * weight
        else:
            rewards[name] = logged.score(name)
    return rewards


def _problem(task: Fields, episode: Fields) -> str:
    env, info = episode.object("env"), episode.object("info")
    of = ((env, "name"), (env, "id"), (episode, "env_name"), (info, "env_name"))
    name = next((found for one, column in of if (found := one.label(column))), "")
    if (key := task.label("key")) is not None:
        return f"{name}/{key}" if name else key
    content = json.dumps([name, task.get("hash") or task.row.get("data", task.row)], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _finish(trace: Fields, nodes: list[Fields]) -> Literal["stop", "length"] | None:
    calls = [call for call in trace.get("calls") or [] if isinstance(call, dict) and call.get("error") is None]
    reasons: list[Any] = [call.get("finish_reason") for call in calls] or [node.get("finish_reason") for node in nodes]
    if trace.get("stop_condition") in _CUT_OFF or (reasons and reasons[-1] == "length"):
        return "length"
    return "stop" if reasons and reasons[-1] == "stop" else None


def _tokens_entry(row: Fields) -> Entry:
    if row.get("schema_version") != 1:
        row.refuse(f"schema {row.get('schema_version')!r} is unknown, expected 1", "Give an export of schema 1.")
    if isinstance(tokens := row.get("tokens"), list):
        named = {"token_ids": "id", "loss_mask": "loss_mask", "advantages": "advantage", "rewards": "reward"}
        named["inference_logprobs"] = "inference_logprob"
        row = row.inside({**row.row, **{many: [t.get(one) for t in tokens] for many, one in named.items()}})
    mask = row.marks("loss_mask")
    pairs = zip(row.get("rewards") or [], mask, strict=False)
    values = {value for value, kept in pairs if kept and value is not None and value == value}
    if len(values) > 1:
        row.refuse("its sampled tokens have several rewards", "Correct that line.")
    reward = row.inside({"rewards": next(iter(values), None)}).score("rewards")
    number = row.need("export_sequence_idx")
    # A run's own step is export_step if several runs share a trainer.
    step = row.count("step" if row.get("export_step") is None else "export_step")
    return masked_entry(
        row,
        mask,
        {"reward": reward} if "rewards" in row else {},
        step=step,
        key="/".join(str(part) for part in (row.get("run_id"), step, row.get("rank"), number)),
        logprobs=row.get("inference_logprobs"),
    )


TRACES = Format("prime-rl", by_row(_trace_entry, _split))
TOKENS = Format("prime-rl-tokens", by_row(_tokens_entry))


_NO_METRICS = {
    *("id", "example_id", "reward", "advantage", "policy_version", "off_policy_steps"),
    *("generation_ms", "scoring_ms", "total_ms"),
}


def _rollout(row: Fields) -> Entry | None:
    if row.get("error") is not None:
        row.leave_out("errored", "the rollout ended with an error")
    if row.get("is_filtered") and row.config.subset.endswith("effective"):
        return None
    if row.get("tool_defs") or row.object("info").get("oai_tools"):
        row.leave_out(
            "multi-turn",
            "its prompt had tools, which the template writes out elsewhere",
            "Train with prime-rl 0.7 or later, whose traces have token ids and masks",
        )
    metrics, reward = _metrics(row), row.score("reward")
    rewards = {"reward" if metrics else row.config.outcome or "reward": reward}
    cut = row.truth("is_truncated")
    return Entry(
        row.where,
        prompt=asked(prompt, row) if is_conversation(prompt := row.need("prompt")) else row.text("prompt"),
        prompt_is="verbatim",
        response=only_answer(row.get("completion"), row),
        rewards=rewards | row.inside(metrics).scores(),
        reward=reward,
        answer=row.answer("answer"),
        problem_id=_example(row),
        step=row.file.step,
        updates=row.whole("policy_version"),
        advantage=row.number("advantage"),
        finish_reason=None if cut is None else "length" if cut else "stop",
        assumed="were sampled while weights were updated: named after the version that is logged"
        if row.get("off_policy_steps")
        else None,
    )


def _example(row: Fields) -> str | None:
    example = row.label("example_id" if "example_id" in row else "id")
    return None if example is None else f"{row.label('env_name') or row.label('task') or ''}/{example}"


def _metrics(row: Fields) -> Row:
    """By name; before 0.1.10 they were columns only."""
    found = row.get("metrics")
    if isinstance(found, dict):
        return found
    others = {name: value for name, value in row.row.items() if name not in _NO_METRICS}
    return {n: v for n, v in others.items() if is_score(n, v) and not isinstance(v, bool)}


VERIFIERS = Format("verifiers", by_row(_rollout))
