"""prime-rl: the traces of its orchestrator, and the opt-in token exports of its trainer.

Read off PrimeIntellect-ai/prime-rl and verifiers (v1 traces, July to September 2026):

- ``rollouts/step_N/{train,eval}/{all,effective}/traces.jsonl`` (since pull request 2983). A line is a trace with
  kind, group_id and policy_version, or, later, an episode with its traces, group and run. ``effective`` repeats
  what is in ``all``: `ImportConfig.subset` picks one.
- ``monitors/file/traces/stream.jsonl`` (since pull request 3444) holds every episode once, those that filters dropped
  with them; which of them were effective is in annotations that are not read.
- ``token_exports/step_N/rank_R.jsonl``: per-token arrays of what the trainer trained on, schema 1. First an object a
  token (id, loss_mask, advantage, reward), then arrays with export_step, run_id and rewards; later with step alone and
  without rewards, so that outcomes are unknown.

A trace is a graph of messages whose nodes hold the token ids that they add, and which of them were sampled. Rewards
are named and weighted; their sum is the reward. Problems are told by the task's key or content; a group_id names a
group of one step. The policy version, in the trace, its info or the episode, counts the optimiser steps behind the
weights.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any, Literal

import numpy as np

from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.entry import (
    Entry,
    Row,
    Unusable,
    answer_text,
    columns_to_keep,
    each_row,
    get,
    label,
    logprobs_of,
    mapping,
    marks,
    masked_entry,
    number,
    score,
    split_by_mask,
    token_ids,
    truth,
    whole,
)
from tsae.rollouts.logs.files import LogFile

TRACES = re.compile(
    r"(^|/)(step_(?P<step>\d+)/)?(?P<subset>(train|eval)/(all|effective))/traces\.jsonl$|(^|/)traces/stream(/\d+)?\.jsonl$"
)
TOKENS = re.compile(r"(^|/)(step_(?P<step>\d+)/)?rank_\d+\.jsonl$")
_CUT_OFF = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "compaction_failed")


def fits_traces(row: Row, config: ImportConfig) -> bool:
    return "task" in row and ("traces" in row or "nodes" in row)


def fits_tokens(row: Row, config: ImportConfig) -> bool:
    return {"schema_version", "export_sequence_idx"} <= row.keys() and (
        {"token_ids", "loss_mask"} <= row.keys() or "tokens" in row
    )


def read_traces(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    # A stream holds work of both kinds; elsewhere the folder has been chosen.
    streamed = (match := TRACES.search(file.name)) is None or match["subset"] is None
    wanted = config.subset.split("/")[0]

    def of(row: Row, where: str) -> Iterator[Entry | Unusable]:
        run = mapping(row, "run", where)
        work = mapping(run, "work", where) if "work" in run else run
        if streamed and row.get("kind", work.get("type", wanted)) != wanted:
            return
        traces = row.get("traces", [row])
        if not isinstance(traces, list):
            raise TsaeError("traces is no list", where=where, fix="Correct that line.")
        if not traces:
            raise Unusable("errored", "the episode failed before it had a trace", where=where)
        for trace in traces:
            try:
                if not isinstance(trace, dict):
                    raise TsaeError("traces holds what is no object", where=where, fix="Correct that line.")
                if truth(mapping(trace, "agent", where).get("trainable", True), "trainable", where):
                    yield _entry(trace, row, work, file, config, where)
            except Unusable as unusable:
                yield unusable

    return each_row(file, config, of)


def _entry(trace: Row, episode: Row, work: Row, file: LogFile, config: ImportConfig, where: str) -> Entry:
    if not trace.get("ok", not (trace.get("errors") or trace.get("error"))):
        raise Unusable("errored", "the rollout ended with an error", where=where)
    nodes = _path(get(trace, "nodes", where), where)
    ids, mask = [], []
    silent = [node for node in nodes if node.get("token_ids") is None]
    if 0 < len(silent) < len(nodes):
        raise TsaeError(
            f"{len(silent)} of its {len(nodes)} messages have no token ids: what the policy read is not known whole",
            where=where,
            fix="Correct or drop that line.",
        )
    for node in nodes:
        ids += token_ids(node.get("token_ids") or [], "token_ids", where).tolist()
        mask += marks(node.get("mask") or [], "mask", where).tolist()
    if not ids:
        raise TsaeError(
            "its messages have no token ids: they were sampled from an API, not from a policy in training",
            where=where,
            fix="Give traces of training, or write the texts into a plain log.",
        )
    sampled = np.asarray(mask, dtype=bool)
    prompt, response, inside = split_by_mask(token_ids(ids, "token_ids", where), sampled, where)
    asked = [
        node["message"]
        for node in takewhile(lambda node: not any(node.get("mask") or []), nodes)
        if isinstance(node.get("message"), dict)
    ]
    advantage, varies = _advantage(trace, nodes, where)
    rewards = _rewards(mapping(trace, "rewards", where), where)
    scored = [value for value in rewards.values() if value is not None]
    told = [mapping(work, "policy", where).get("start")]
    told += [where_told.get("policy_version") for where_told in (episode, mapping(trace, "info", where))]
    policy = next((version for version in told if version is not None), None)
    task = mapping(trace if "task" in trace else episode, "task", where)
    data = mapping(task, "data", where) if "data" in task else task
    step = file.step if file.step is not None else whole(work.get("step"), "step", where)
    return Entry(
        where,
        prompt=asked,
        prompt_ids=prompt,
        response_ids=response,
        sampled=inside,
        rewards=rewards,
        reward=sum(scored) if scored else None,
        unscored=not scored,
        answer=answer_text(data.get(config.columns.answer)),
        level=label(data.get(config.columns.level), config.columns.level, where),
        problem_id=_problem(task, episode, where),
        step=step,
        updates=whole(policy, "policy_version", where),
        advantage=advantage,
        advantage_varies=varies,
        group=_group(trace, episode, where),
        logprobs=logprobs_of([value for node in nodes for value in node.get("logprobs") or []], response),
        template={"tools": tools} if (tools := trace.get("tools")) else {},
        finish_reason=_finish(trace, nodes),
        key=label(trace.get("id"), "the trace's id", where),
        extra=columns_to_keep(data, config),
    )


def _path(nodes: Any, where: str) -> list[dict[str, Any]]:
    """The messages from the root to the only leaf."""
    if not isinstance(nodes, list) or not nodes or not all(isinstance(node, dict) for node in nodes):
        raise TsaeError("nodes is no list of messages", where=where, fix="Correct that line.")
    parents = [node.get("parent") for node in nodes]
    if any(p is not None and not (isinstance(p, int) and 0 <= p < i) for i, p in enumerate(parents)):
        raise TsaeError("a node's parent does not come before it", where=where, fix="Correct that line.")
    # A graph without branches lists its messages in order.
    if parents != [None, *range(len(nodes) - 1)]:
        raise Unusable("multi-turn", "the messages branch into several conversations", where=where)
    return nodes


def _rewards(logged: Row, where: str) -> dict[str, float | None]:
    rewards: dict[str, float | None] = {}
    for name, value in logged.items():
        if isinstance(value, Mapping):
            found, weight = score(value.get("score"), name, where), number(value.get("weight", 1.0), name, where)
            rewards[name] = None if found is None or weight is None else found * weight
        else:
            rewards[name] = score(value, name, where)
    return rewards


def _problem(task: Row, episode: Row, where: str) -> str:
    env, info = (mapping(episode, name, where) for name in ("env", "info"))
    names = (env.get("name"), env.get("id"), episode.get("env_name"), info.get("env_name"))
    name = next((found for one in names if (found := label(one, "the environment's name", where))), "")
    if (key := label(task.get("key"), "the task's key", where)) is not None:
        return f"{name}/{key}" if name else key
    content = json.dumps([name, task.get("hash") or task.get("data", task)], sort_keys=True, default=str)
    return hashlib.blake2b(content.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _group(trace: Row, episode: Row, where: str) -> str | None:
    told = (trace.get("group_id"), episode.get("group_id"), mapping(trace, "info", where).get("group_id"))
    return next((str(group) for group in told if isinstance(group, (str, int))), None)


def _advantage(trace: Row, nodes: list[dict[str, Any]], where: str) -> tuple[float | None, bool]:
    """(the trajectory's advantage, whether its tokens have several)."""
    per_token = [a for node in nodes for a in node.get("advantages") or [] if a is not None]
    if per_token:
        return number(float(np.mean(per_token)), "advantages", where), len(set(per_token)) > 1
    return number(trace.get("advantage"), "advantage", where), False


def _finish(trace: Row, nodes: list[dict[str, Any]]) -> Literal["stop", "length"] | None:
    calls = [call for call in trace.get("calls") or [] if isinstance(call, dict) and call.get("error") is None]
    reasons = [call.get("finish_reason") for call in calls] or [node.get("finish_reason") for node in nodes]
    if trace.get("stop_condition") in _CUT_OFF or (reasons and reasons[-1] == "length"):
        return "length"
    return "stop" if reasons and reasons[-1] == "stop" else None


def read_tokens(file: LogFile, config: ImportConfig) -> Iterator[Entry | Unusable]:
    def of(row: Row, where: str) -> Iterator[Entry]:
        if row.get("schema_version") != 1:
            raise TsaeError(f"schema {row.get('schema_version')!r} is unknown, expected 1", where=where)
        if isinstance(tokens := row.get("tokens"), list):
            named = {"token_ids": "id", "loss_mask": "loss_mask", "advantages": "advantage", "rewards": "reward"}
            named["inference_logprobs"] = "inference_logprob"
            row = {**row, **{many: [t.get(one) for t in tokens] for many, one in named.items()}}
        mask = marks(get(row, "loss_mask", where), "loss_mask", where)
        rewards = row.get("rewards") or []
        pairs = zip(rewards, mask, strict=False)
        values = {value for value, kept in pairs if kept and value is not None and value == value}
        if len(values) > 1:
            raise TsaeError("its sampled tokens have several rewards", where=where, fix="Correct that line.")
        number_of_it = get(row, "export_sequence_idx", where)
        exported = row.get("export_step")  # A run's own step, where several runs share a trainer.
        step = whole(get(row, "step", where) if exported is None else exported, "step", where)
        yield masked_entry(
            get(row, "token_ids", where),
            mask,
            next(iter(values), None),
            row.get("advantages"),
            where,
            step=step,
            key="/".join(str(part) for part in (row.get("run_id"), step, row.get("rank"), number_of_it)),
            rewarded="rewards" in row,
            logprobs=row.get("inference_logprobs"),
        )

    return each_row(file, config, of)
