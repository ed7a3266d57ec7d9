"""What is recorded of a policy's responses, of the log of a training, and inside the models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch

from real_llm.problems import WordProblem, follows, written_steps
from tsae.rollouts.rewards import number_in

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tsae.checkpoints.loading import Checkpoint

FIELDS = ("right", "direct", "flawless", "carried", "coherent", "length", "repeated", "answer")


def facts(problem: WordProblem, text: str, n_tokens: int) -> dict[str, float | None]:
    """What one response does.

    right      its last number is the answer
    direct     it writes no step
    flawless   right, and its steps are those of the problem
    carried    share of the problem's steps that it writes
    coherent   share of its later steps that go on from the result before and are computed right; None without any
    length     tokens
    repeated   it writes a step twice
    answer     its last number; None without any
    """
    steps, wanted, number = written_steps(text), list(problem.steps), number_in(text)
    answer = None if number is None else float(number)
    right = answer == float(problem.problem.answer)
    return {
        "right": float(right),
        "direct": float(not steps),
        "flawless": float(right and steps == wanted),
        "carried": sum(step in steps for step in wanted) / len(wanted),
        "coherent": float(np.mean(follows(steps))) if len(steps) > 1 else None,
        "length": float(n_tokens),
        "repeated": float(len(set(steps)) < len(steps)),
        "answer": answer,
    }


def by_problem(frame: pd.DataFrame, problems: Mapping[str, WordProblem]) -> dict[str, dict[str, list[float | None]]]:
    """Of every problem, by id: a list a field, one entry a response.

    Args:
        frame: problem_id, response, response_length.
        problems: by id.
    """
    found: dict[str, dict[str, list[float | None]]] = {}
    for row in frame.itertuples():
        seen = facts(problems[row.problem_id], str(row.response), row.response_length)
        lists = found.setdefault(row.problem_id, {name: [] for name in FIELDS})
        for name in FIELDS:
            lists[name].append(seen[name])
    return found


def of_log(folder: Path, problems: Mapping[str, WordProblem]) -> list[dict[str, float]]:
    """Of every step of TRL's log: means over responses, and what lone successes are.

    lone, others            successes that are their group's only one, and all other successes
    lone_direct, others_direct, lone_flawed, others_flawed
                            of these, the direct answers, and those whose steps are not those of the problem
    lone_length, others_length
                            sums of tokens
    silent                  share of groups whose responses have all the same reward, and so no advantage
    top_answer              share of the most frequent answer: how much answers repeat over problems
    """
    found = []
    for file in sorted((folder / "completions").glob("*.parquet")):
        frame = pd.read_parquet(file)
        rows = pd.DataFrame(
            [facts(problems[row.problem_id], row.completion, len(row.completion_ids)) for row in frame.itertuples()]
        )
        group = frame.problem_id.to_numpy()
        right = rows.right.to_numpy() > 0
        successes = pd.Series(right).groupby(group).transform("sum").to_numpy()
        sizes = pd.Series(right).groupby(group).transform("size").to_numpy()
        step: dict[str, float] = {"step": float(frame.step.iloc[0]), "n": float(len(frame))}
        step |= {name: float(rows[name].mean()) for name in FIELDS if name not in ("answer", "coherent")}
        step["coherent"] = float(rows.coherent.astype(float).mean())
        step["top_answer"] = max(Counter(rows.answer.tolist()).values()) / len(rows)
        step["silent"] = float(((successes == 0) | (successes == sizes)).mean())
        for name, some in (("lone", right & (successes == 1)), ("others", right & (successes > 1))):
            step[name] = float(some.sum())
            step[f"{name}_direct"] = float(rows.direct[some].sum())
            step[f"{name}_flawed"] = float((1 - rows.flawless[some]).sum())
            step[f"{name}_length"] = float(rows.length[some].sum())
        found.append(step)
    return found


@torch.no_grad()
def sparsity(model: PreTrainedModel, tokenizer: Any, problems: Sequence[WordProblem]) -> list[list[float]]:
    """Hoyer sparsity of every block's output, and of the final norm's, at the prompt's last token: (problem, layer).

    (√d − ‖x‖₁ / ‖x‖₂) / (√d − 1), Hoyer 2004: 0 if all entries are equal, 1 if only one is not 0.
    """
    found = []
    for one in problems:
        ids = torch.tensor([tokenizer.encode(one.problem.prompt, add_special_tokens=False)])
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states[1:]
        x = torch.stack([state[0, -1] for state in states]).double()  # (layers, d_model)
        root = x.shape[-1] ** 0.5
        found.append(((root - x.norm(p=1, dim=-1) / x.norm(dim=-1)) / (root - 1)).tolist())
    return found


def with_update_outside(checkpoint: Checkpoint, layers: range) -> PreTrainedModel:
    """The model of a LoRA adapter whose update is taken back in these layers: it is then the base's there."""
    from peft import AutoPeftModelForCausalLM

    adapted: Any = AutoPeftModelForCausalLM.from_pretrained(checkpoint.path, dtype="bfloat16")
    for name, weight in adapted.named_parameters():
        if "lora_B" in name and int(name.split(".layers.")[1].split(".")[0]) in layers:
            weight.data.zero_()
    merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.eval()
