"""Second look: what a log says twice is compared after the import.

Five comparisons: prompts (`Prompts`) and responses, if a log has both their token ids and a text; advantages with
rewards (`check_advantages`); outcomes with reference answers (`check_answers`); log-probabilities with those of the
checkpoint (`LogProbs`). What cannot be compared is counted separately, and is not a disagreement. Memory holds some
numbers of every trajectory, and samples of a fixed size.

Whether logged log-probabilities are those of the checkpoint that sampled, a few trajectories show that go through it:

1. Up to 4 trajectories of the first and up to 4 of the last checkpoint of the series that sampled and whose weights lie
   on this disk: at most 128 tokens of a response, in the precision of the file.
2. The mean absolute difference a token is compared: in a sum the errors of a shifted row cancel. More than 0.1 nats is
   a difference. Engines that sample in bfloat16 differ from the trainer's forward pass by 0.01 to 0.03, weights a few
   updates apart by hardly more: this finds other weights, prompts or templates and shifted tokens, but not a policy
   that is one update off.
3. Log-probabilities may be those of the softmax at the sampling temperature. If temperature 1 does not fit, one
   temperature from 0.2 to 1.5 that fits every trajectory is assumed, and named.
4. If all tokens of a response have the same value, that is a placeholder, and is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from tsae.checkpoints.adapters import base_of
from tsae.checkpoints.loading import Checkpoint, ModelLoader
from tsae.checkpoints.weight_files import folder_of, is_adapter, is_gguf, is_hub_id, weight_files
from tsae.errors import TsaeError
from tsae.rollouts.generation import response_logits
from tsae.rollouts.logs.check_advantages import recompute
from tsae.rollouts.logs.check_answers import DUPLICATES, Reservoir, recheck, several_answers
from tsae.rollouts.logs.entry import Entry, Findings, hash64, place_hash
from tsae.rollouts.logs.log_files import LogFile
from tsae.rollouts.logs.tokens import Prompt, Response, Tokens

_MOST_PARTS = 16
_NAN = float("nan")


class ConsistencyChecks:
    """Sees every trajectory once, in the order of the log, and compares at the end.

    Args:
        tokens: of the import.
        checkpoints: of the series, if it distinguishes policies.
        findings: of the log, or of a part of it.
    """

    def __init__(self, tokens: Tokens, checkpoints: Sequence[Checkpoint], findings: Findings) -> None:
        self.findings, self.counts = findings, findings.counts
        self.prompts, self.answers = Prompts(tokens, findings), Reservoir(findings)
        self.logprobs = LogProbs(checkpoints, findings)

    def see(
        self,
        entry: Entry,
        file: LogFile,
        prompt: Prompt,
        response: Response,
        *,
        problem: str,
        policy: str,
        reward: float | None,
        right: bool | None,
    ) -> dict[str, Any]:
        """Take the next trajectory; returns what is compared across the log, by column of the index.

        Args:
            entry: of the log.
            file: its file.
            prompt: its token ids.
            response: its token ids.
            problem: id.
            policy: name.
            reward: that was trained on, by the log.
            right: by the log, whatever a verifier says; None if it does not say.
        """
        self.prompts.see(entry, prompt)
        step = hash64(entry.policy or file.run, str(entry.step))
        group = hash64(str(step), problem, entry.group or "")
        self.counts["consistency"].update({"varying": entry.advantage_varies, "answers": bool(entry.answer)})
        several = entry.rewards if len(entry.rewards) > 1 else {}
        named = self.counts["several rewards"]
        for name in several:
            if name in named or len(named) < _MOST_PARTS:
                named[name] += 1
        if entry.answer and right is not None:
            self.answers.put(response.text, entry.answer, right, group, entry.where)
        # Of several turns, the tokens that were not sampled have no log-probability.
        if entry.logprobs is not None and entry.response_ids is not None and entry.sampled is None:
            self.logprobs.put(policy, prompt.ids, response.ids, entry.logprobs, entry.where)
        return {
            "group": group,
            "asked": hash64(str(step), prompt.ids.tobytes()),
            "gold": hash64(entry.answer) if entry.answer else 0,
            "batch": step,
            "trained_on": _NAN if reward is None else reward,
            "compared": _NAN if entry.advantage is None or entry.advantage_varies else entry.advantage,
            "parts_of_reward": [_NAN if several.get(n) is None else several[n] for n in named] if several else None,
        }

    def checks(
        self, index: pd.DataFrame, parts: np.ndarray, kept: np.ndarray, place: Callable[[int], str]
    ) -> tuple[Check, ...]:
        """All comparisons, in the order in which they are printed.

        Args:
            index: same_text, retokenised, and the columns of `see`, of every trajectory.
            parts: (n, n_rewards) the rewards that make up a total; NaN where there is none.
            kept: (n,) bool, whether a trajectory goes into the table.
            place: file and line of a trajectory, by its number.
        """
        rows = np.flatnonzero(kept)
        return (
            self.prompts.check(),
            _responses(index.same_text.to_numpy(), ~index.retokenised.to_numpy(), place),
            self._advantages(index, parts, rows, place),
            self._answers(index, rows, place),
            self.logprobs.check(),
        )

    def _advantages(
        self, index: pd.DataFrame, parts: np.ndarray, rows: np.ndarray, place: Callable[[int], str]
    ) -> Check:
        if not np.isfinite(index.compared).any():
            why = "they differ from token to token" if self.counts["consistency"]["varying"] else "the log has none"
            return Check("advantages", "groups", 0, 0, note=why)
        reward, advantage, group, step = (
            index[name].to_numpy()[rows] for name in ("trained_on", "compared", "group", "batch")
        )
        found = recompute(reward, advantage, group, step, parts[rows])
        notes = [f"{formula} gives those of {n:,}" for formula, n in list(found.formulas.items())[:1]]
        if found.constant:
            notes.append(f"in {found.constant:,} all rewards are equal")
        if found.contradict:
            notes.append(
                "no formula gives the advantages of the others from their rewards: rewards may have weights, or other "
                "columns were used (--rewards), or rows are mixed up"
            )
        if not found.follow + found.contradict:
            notes = ["they follow no formula that is known, or groups lack members"]
            if not np.isfinite(index.trained_on).any():
                notes = ["the log has no rewards"]
        return Check(
            "advantages",
            "groups",
            compared=found.follow + found.contradict,
            differ=found.contradict,
            not_compared=found.unclear,
            example=None if found.first is None else place(int(rows[found.first])),
            note="; ".join(notes),
        )

    def _answers(self, index: pd.DataFrame, rows: np.ndarray, place: Callable[[int], str]) -> Check:
        if not self.counts["consistency"]["answers"]:
            return Check("answers", "responses", 0, 0, note="the log has no reference answers")
        told, several, first = several_answers(*(index[name].to_numpy()[rows] for name in ("asked", "gold", "batch")))
        mixed = several > max(1, DUPLICATES * told)
        found = recheck(self.answers.sample())
        notes = [f"checked with {found.verifier}"] if found.compared else []
        if found.contradicts:
            notes.append(
                f"they agree hardly better than by chance ({found.measure}, where 1 is best and 0 is chance): prompts, "
                "answers and completions may be misaligned in the log, or the outcome is not whether the answer is "
                "right (--outcome, --success-above)"
            )
        elif found.differ:
            notes.append(
                f"far better than by chance ({found.measure}, where 1 is best and 0 is chance), so that the run's "
                "verifier differs on some"
                if found.telling
                else "too few different responses to tell a verifier that differs from rows that are mixed up"
            )
        if mixed:
            notes.append(
                f"{several:,} of {told:,} prompts have several reference answers in one step: prompts and completions "
                "may be misaligned in the log"
            )
        if not found.compared and not mixed:
            notes = [f"{found.verifier} can read no answer" if found.not_compared else "no outcome is known"]
        # If prompts are mixed up, these are what disagrees.
        by_sample = found.contradicts or not mixed
        return Check(
            "answers",
            "responses of a sample" if by_sample else "prompts",
            *((found.compared, found.differ) if by_sample else (told, several)),
            not_compared=found.not_compared,
            example=place(int(rows[first])) if mixed and first is not None and not found.first else found.first,
            note="; ".join(notes),
            contradicts=found.contradicts or mixed,
        )


def _responses(same_text: np.ndarray, logged: np.ndarray, place: Callable[[int], str]) -> Check:
    differ = np.flatnonzero(logged & (same_text == 0))
    n = int((logged & (same_text != 2)).sum())
    note = "the log has no texts" if logged.any() else "the log has no token ids"
    if n:
        note = "their tokens decode to another text: give the checkpoint that was trained" if len(differ) else ""
    return Check(
        "responses",
        "responses",
        n,
        len(differ),
        not_compared=len(logged) - n if n else 0,
        example=place(int(differ[0])) if len(differ) else None,
        note=note,
    )


@dataclass(frozen=True)
class Check:
    """What one comparison found."""

    name: str
    unit: str
    """What is counted."""
    compared: int
    differ: int
    not_compared: int = 0
    example: str | None = None
    """File and line of the first difference."""
    note: str = ""
    """How it was compared, what follows, or why nothing was."""
    contradicts: bool | None = None
    """Whether the differences contradict the log. None: any difference does."""

    @property
    def disagrees(self) -> bool:
        """Whether it contradicts the log."""
        return self.differ > 0 if self.contradicts is None else self.contradicts

    def __str__(self) -> str:
        if not self.compared:
            return f"{self.name}: not compared ({self.note})"
        verb = "disagree" if self.disagrees or not self.differ else "differ"
        text = f"{self.name}: {self.compared:,} {self.unit} compared, {self.differ:,} {verb}"
        text += f" (first: {self.example})" if self.example else ""
        text += f", {self.not_compared:,} cannot be compared" if self.not_compared else ""
        return text + (f"; {self.note}" if self.note else "")

    def as_dict(self) -> dict[str, Any]:
        """What goes into the table's info and into the record of a run."""
        return {
            "unit": self.unit,
            "compared": self.compared,
            "differ": self.differ,
            "share": self.differ / self.compared if self.compared else None,
            "not_compared": self.not_compared,
            "disagrees": self.disagrees,
            "example": self.example,
            "line": str(self),
        }


_KEPT_PROMPTS = 256


class Prompts:
    """Encodes the prompts that a log has both as token ids and as text or messages."""

    def __init__(self, tokens: Tokens, findings: Findings) -> None:
        self.tokens = tokens
        self.found, self.first = findings.counts["prompts"], findings.first["prompts"]
        """Prompts: logged (with token ids), compared, differ, and unclear (the template renders no such prompt)."""
        self.arguments = findings.counts["template arguments"]
        """Arguments of the template without which it does not give the prompts."""
        self._known: dict[int, tuple[bool | None, str]] = {}

    def see(self, entry: Entry, prompt: Prompt) -> None:
        """Compare the next prompt."""
        if entry.prompt_ids is None:
            return
        self.found["logged"] += 1
        if entry.prompt is None:
            return
        said = json.dumps([entry.prompt, dict(entry.template)], sort_keys=True, default=str)
        key = hash64(said, prompt.ids.tobytes())
        if key not in self._known:
            if len(self._known) == _KEPT_PROMPTS:
                self._known.clear()
            self._known[key] = self.tokens.encodes(entry, prompt.ids)
        same, arguments = self._known[key]
        if same is None:
            self.found["unclear"] += 1
            return
        self.found["compared"] += 1
        if arguments:
            self.arguments[arguments] += 1
        if not same:
            self.found["differ"] += 1
            self.first.setdefault("differ", entry.where)

    def check(self) -> Check:
        """The result."""
        n, unclear, differ = (self.found[name] for name in ("compared", "unclear", "differ"))
        notes = [
            f"{times:,} were rendered with {arguments}, as their tokens show (--template-arguments '{arguments}')"
            for arguments, times in self.arguments.most_common(3)
        ]
        if differ:
            notes.append(
                "the chat template gives other tokens: try --template-arguments, such as "
                "'{\"enable_thinking\": false}', --system-prompt, or the checkpoint that was trained"
            )
        if not n:
            notes = ["the log has token ids alone" if self.found["logged"] else "the log has no token ids"]
            if unclear:
                notes = ["the chat template renders none of them"]
        return Check("prompts", "prompts", n, differ, unclear if n else 0, self.first.get("differ"), "; ".join(notes))


_TOKENS, _PROMPT = 128, 4096
_MOST_BYTES = 2 << 30
"""Weights that an import loads; about a billion parameters in bfloat16."""
_MOST_OFF = 0.1
_TEMPERATURES = (1.0, *(round(0.1 * i, 1) for i in range(2, 16) if i != 10))


class Told(NamedTuple):
    """A trajectory with logged log-probabilities."""

    prompt: np.ndarray
    """(n_prompt,) token ids."""
    response: np.ndarray
    """(n_response,)."""
    logprobs: np.ndarray
    """(n_response,) nats."""
    where: str


class LogProbs:
    """Keeps a few trajectories of every checkpoint, and compares them at the end."""

    def __init__(self, checkpoints: Sequence[Checkpoint], findings: Findings) -> None:
        self.checkpoints, self.findings = list(checkpoints), findings
        self._ids = {checkpoint.id for checkpoint in checkpoints}
        self._placeholders = findings.counts["placeholders"]
        """Values that all tokens of some response have."""

    def put(self, policy: str, prompt: np.ndarray, response: np.ndarray, logprobs: np.ndarray, where: str) -> None:
        """Take a trajectory that has log-probabilities."""
        self.findings.counts["consistency"]["log-probabilities"] += 1
        if len(logprobs) > 1 and np.ptp(logprobs) == 0:
            self._placeholders[repr(float(logprobs[0]))] += 1
        elif policy in self._ids and len(prompt) <= _PROMPT and len(logprobs) == len(response):
            told = [part.tolist() for part in (prompt, response[:_TOKENS], logprobs[:_TOKENS])]
            self.findings.draw(f"log-probabilities {policy}", place_hash(where), [*told, where])

    def _kept(self, id: str) -> list[Told]:
        """What was drawn of a checkpoint, without placeholders: a single token is one if it has a known value."""
        drawn = (told for _, told in self.findings.samples[f"log-probabilities {id}"])
        kept = [Told(np.array(p), np.array(r), np.array(given), where) for p, r, given, where in drawn]
        return [t for t in kept if len(t.logprobs) > 1 or repr(float(t.logprobs[0])) not in self._placeholders]

    def check(self) -> Check:
        """Compare what was kept with the checkpoints' weights."""
        if not self.findings.counts["consistency"]["log-probabilities"]:
            return _not_compared("the log has none")
        kept = {checkpoint.id: self._kept(checkpoint.id) for checkpoint in self.checkpoints}
        sampled = [checkpoint for checkpoint in self.checkpoints if kept[checkpoint.id]]
        if not sampled:
            told = "no trajectory is known to be sampled by a checkpoint that is here"
            if not self.checkpoints:
                told = "it is not known whether this single checkpoint sampled"
            if self._placeholders:
                told = "all tokens of a response have the same one, as placeholders have"
            return _not_compared(told)
        off: list[tuple[str, np.ndarray]] = []
        ends = list(dict.fromkeys((sampled[0], sampled[-1])))
        for checkpoint in ends:
            try:
                if why := _unreadable(checkpoint):
                    return _not_compared(why)
                off += _differences(checkpoint, kept[checkpoint.id])
            except TsaeError as error:
                return _not_compared(f"{checkpoint.id}: {error.what}")
            except (RuntimeError, IndexError, ValueError) as error:  # of a model that cannot read these tokens
                return _not_compared(f"{checkpoint.id}: {(str(error).splitlines() or ['?'])[0]}")
        by_temperature = np.stack([values for _, values in off])  # (n_trajectories, n_temperatures)
        at = int(by_temperature.max(axis=0).argmin())
        if by_temperature[:, 0].max() <= _MOST_OFF or by_temperature[:, at].max() > _MOST_OFF:
            at = 0
        differ = np.flatnonzero(by_temperature[:, at] > _MOST_OFF)
        names = " and ".join(checkpoint.id for checkpoint in ends)
        note = f"with the weights of {names}: mean difference {by_temperature[:, at].mean():.3f} nats a token"
        note += f" at temperature {_TEMPERATURES[at]:g}" * (at > 0)
        if len(differ):
            note += (
                "; other weights sampled them, or another prompt was read, or fewer tokens were allowed (top-p, top-k)"
            )
        first = off[differ[0]][0] if len(differ) else None
        return Check("log-probabilities", "trajectories", len(off), len(differ), example=first, note=note)


def _not_compared(why: str) -> Check:
    return Check("log-probabilities", "trajectories", 0, 0, note=why)


def _unreadable(checkpoint: Checkpoint) -> str | None:
    """Why a checkpoint's weights are not loaded for this; None if they may be.

    Raises:
        TsaeError: if its files are not there.
    """
    size = 0
    adapts = not is_hub_id(checkpoint.path) and not is_gguf(checkpoint.path) and is_adapter(folder_of(checkpoint))
    for part in (checkpoint, *([base_of(checkpoint)] if adapts else [])):
        if is_hub_id(part.path):
            return f"{part.path} is not on this disk as a folder"
        folder = folder_of(part)
        files = [Path(folder)] if is_gguf(folder) else weight_files(folder)
        size += sum(file.stat().st_size for file in files)
    if size <= _MOST_BYTES:
        return None
    return f"{checkpoint.id} has {size / 2**30:.1f} GiB of weights, too many to load here"


def _differences(checkpoint: Checkpoint, kept: Sequence[Told]) -> list[tuple[str, np.ndarray]]:
    """(place, (n_temperatures,) mean absolute difference a token) of every trajectory."""
    model, found = ModelLoader().load(checkpoint), []
    for told in kept:
        logits, sampled = response_logits(model, told.prompt, told.response)
        of_temperatures = ((logits / t).log_softmax(-1).gather(-1, sampled)[:, 0].numpy() for t in _TEMPERATURES)
        found.append((told.where, np.array([np.abs(given - told.logprobs).mean() for given in of_temperatures])))
    return found
