"""Second look: what a log says twice is compared after the import.

Five comparisons: prompts (`look_prompts`) and responses, if a log has both their token ids and a text; advantages with
rewards (`look_advantages`); outcomes with reference answers (`look_answers`); log-probabilities with those of the
checkpoint (`look_logprobs`). What cannot be compared is counted separately, and is no disagreement. Memory holds 48
bytes a trajectory and 8 for each of several rewards, and samples of a fixed size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.logs.checks.check import Check
from tsae.rollouts.logs.checks.look_advantages import recompute
from tsae.rollouts.logs.checks.look_answers import Reservoir, recheck, several_answers, too_many
from tsae.rollouts.logs.checks.look_logprobs import LogProbs
from tsae.rollouts.logs.checks.look_prompts import Prompts
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.hashes import hash64
from tsae.rollouts.logs.on_disk.log_files import LogFile
from tsae.rollouts.logs.tokenising.tokens import Prompt, Response, Tokens

_MOST_PARTS = 16
_NUMBERS = {"group": "Q", "asked": "Q", "answer": "Q", "step": "Q", "reward": "d", "advantage": "d"}


class SecondLook:
    """Sees every trajectory once, in the order of the ledger, and compares at the end.

    Args:
        tokens: of the import.
        checkpoints: of the series, if it distinguishes policies.
    """

    def __init__(self, tokens: Tokens, checkpoints: Sequence[Checkpoint]) -> None:
        self.prompts, self.answers, self.logprobs = Prompts(tokens), Reservoir(), LogProbs(checkpoints)
        self.numbers: dict[str, array[Any]] = {name: array(kind) for name, kind in _NUMBERS.items()}
        """One a trajectory: labels of group, prompt, reference answer (0 for none) and step; reward and advantage."""
        self.parts: dict[str, array[Any]] = {}
        """The rewards that make up a total: by name, one a trajectory; NaN where there is none."""
        self.n_answers = self.varying = 0

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
    ) -> None:
        """Take the next trajectory.

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
        self.varying += entry.advantage_varies
        advantage = None if entry.advantage_varies else entry.advantage
        numbers = {
            "group": group,
            "asked": hash64(str(step), prompt.ids.tobytes()),
            "answer": hash64(entry.answer) if entry.answer else 0,
            "step": step,
            "reward": float("nan") if reward is None else reward,
            "advantage": float("nan") if advantage is None else advantage,
        }
        for name, value in numbers.items():
            self.numbers[name].append(value)
        several = entry.rewards if len(entry.rewards) > 1 else {}
        self._add_parts({name: [float("nan") if r is None else r] for name, r in several.items()}, 1)
        if entry.answer:
            self.n_answers += 1
            if right is not None:
                self.answers.put(response.text, entry.answer, right, group, entry.where)
        # Of several turns, the tokens that were not sampled have no log-probability.
        if entry.logprobs is not None and entry.response_ids is not None and entry.sampled is None:
            self.logprobs.put(policy, prompt.ids, response.ids, entry.logprobs, entry.where)

    def _add_parts(self, found: Mapping[str, Sequence[float]], n: int) -> None:
        """Add rewards of the next `n` trajectories, whose numbers are there already."""
        before = len(self.numbers["group"]) - n
        for name in found:
            if name not in self.parts and len(self.parts) < _MOST_PARTS:
                self.parts[name] = array("d", [float("nan")] * before)
        for name, values in self.parts.items():
            values.extend(found.get(name, [float("nan")] * n))

    def state(self, file: Path) -> dict[str, Any]:
        """What was seen of a part of the log, for JSON; numbers of every trajectory go into a file."""
        with file.open("wb") as to:
            for values in (self._table(), *map(np.asarray, self.parts.values())):
                np.save(to, values, allow_pickle=False)
        return {
            "parts": list(self.parts),
            "n": [self.n_answers, self.varying],
            "prompts": self.prompts.state(),
            "answers": self.answers.state(),
            "logprobs": self.logprobs.state(),
        }

    def _table(self) -> np.ndarray:
        found = np.zeros(len(self.numbers["group"]), dtype=[(n, np.dtype(kind)) for n, kind in _NUMBERS.items()])
        for name, values in self.numbers.items():
            found[name] = values
        return found

    def add(self, file: Path, state: Mapping[str, Any]) -> None:
        """Add what was seen of the next part of the log."""
        with file.open("rb") as stream:
            found = np.load(stream, allow_pickle=False)
            parts = {name: np.load(stream, allow_pickle=False) for name in state["parts"]}
        for name in _NUMBERS:
            self.numbers[name].frombytes(found[name].tobytes())
        self._add_parts(parts, len(found))
        self.n_answers += state["n"][0]
        self.varying += state["n"][1]
        self.prompts.add(state["prompts"])
        self.answers.add(state["answers"])
        self.logprobs.add(state["logprobs"])

    def checks(
        self, same_text: np.ndarray, logged: np.ndarray, kept: np.ndarray, place: Callable[[int], str]
    ) -> tuple[Check, ...]:
        """All comparisons, in the order in which they are printed.

        Args:
            same_text: (n,) whether a response's ids decode to the log's text: 0 no, 1 yes, 2 no text.
            logged: (n,) bool, whether the log has the response's ids.
            kept: (n,) bool, whether a trajectory goes into the table.
            place: file and line of a trajectory, by its number.
        """
        rows = np.flatnonzero(kept)
        return (
            self.prompts.check(),
            _responses(same_text, logged, place),
            self._advantages(rows, place),
            self._answers(rows, place),
            self.logprobs.check(),
        )

    def _numbers(self, rows: np.ndarray, *names: str) -> Iterator[np.ndarray]:
        return (np.asarray(self.numbers[name])[rows] for name in names)

    def _advantages(self, rows: np.ndarray, place: Callable[[int], str]) -> Check:
        if not np.isfinite(np.asarray(self.numbers["advantage"])).any():
            why = "they differ from token to token" if self.varying else "the log has none"
            return Check("advantages", "groups", 0, 0, note=why)
        parts = np.stack([np.asarray(v)[rows] for v in self.parts.values()], axis=1) if self.parts else None
        reward, advantage, group, step = self._numbers(rows, "reward", "advantage", "group", "step")
        found = recompute(reward, advantage, group, step, parts)
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
            if not np.isfinite(np.asarray(self.numbers["reward"])).any():
                notes = ["the log has no rewards"]
        return Check(
            "advantages",
            "groups",
            compared=found.follow + found.contradict,
            differ=found.contradict,
            not_compared=found.unclear,
            example=None if found.first is None else place(int(rows[found.first])),
            disagrees=found.contradict > 0,
            note="; ".join(notes),
        )

    def _answers(self, rows: np.ndarray, place: Callable[[int], str]) -> Check:
        if not self.n_answers:
            return Check("answers", "responses", 0, 0, note="the log has no reference answers")
        told, several, first = several_answers(*self._numbers(rows, "asked", "answer", "step"))
        mixed = too_many(told, several)
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
            disagrees=found.contradicts or mixed,
            note="; ".join(notes),
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
        disagrees=len(differ) > 0,
        note=note,
    )


def refuse_disagreement(checks: Sequence[Check], where: Path) -> None:
    """Refuse a log that does not agree with itself (`ImportConfig.strict`).

    Raises:
        TsaeError: naming every check that disagrees.
    """
    wrong = [str(check) for check in checks if check.disagrees]
    if wrong:
        what = f"does not agree with itself: {'. '.join(wrong)}"
        raise TsaeError(what, where=where, fix="Mend what is named, or import it without --strict.")
