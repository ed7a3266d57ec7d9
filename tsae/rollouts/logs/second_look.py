"""A second look at what an import read: five things that a log says twice are compared with one another.

prompts, where a log has both token ids and a text or messages; responses, likewise; advantages against rewards
(`look_advantages`); outcomes against reference answers (`look_answers`); log-probabilities against the checkpoint's own
(`look_logprobs`). What cannot be compared is counted by itself, and is no disagreement. Memory holds 48 bytes a
trajectory and samples of a fixed size.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tsae.checkpoints.checkpoint import Checkpoint
from tsae.errors import TsaeError
from tsae.rollouts.logs.entry import Entry
from tsae.rollouts.logs.files import LogFile
from tsae.rollouts.logs.ledger import hash64
from tsae.rollouts.logs.look_advantages import recompute
from tsae.rollouts.logs.look_answers import Reservoir, recheck, several_answers, too_many
from tsae.rollouts.logs.look_logprobs import LogProbs
from tsae.rollouts.logs.summary import Check
from tsae.rollouts.logs.tokens import Prompt, Response, Tokens

_KEPT_PROMPTS = 256
_COUNTS = ("compared", "differ", "unclear", "logged")
_NUMBERS = ("group", "asked", "answer", "step", "reward", "advantage")


class SecondLook:
    """Sees every trajectory once, in the order of the ledger, and says at the end what does not fit.

    Args:
        tokens: of the import.
        checkpoints: of the series, where it tells policies apart.
    """

    def __init__(self, tokens: Tokens, checkpoints: Sequence[Checkpoint]) -> None:
        self.tokens = tokens
        self.prompts = _Prompts(tokens)
        self.answers = Reservoir()
        self.logprobs = LogProbs(checkpoints)
        self.group, self.asked, self.answer, self.step = (array("Q") for _ in range(4))
        self.reward, self.advantage = array("d"), array("d")
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
            entry: as its reader made it.
            file: its file.
            prompt: its token ids.
            response: its token ids.
            problem: id.
            policy: name.
            reward: that was trained on, by the log.
            right: by the log, whatever a verifier says; None where it does not say.
        """
        self.prompts.see(entry, prompt)
        step = hash64(entry.policy or file.run, str(entry.step))
        group = hash64(str(step), problem, entry.group or "")
        self.step.append(step)
        self.group.append(group)
        self.asked.append(hash64(str(step), prompt.ids.tobytes()))
        self.answer.append(hash64(entry.answer) if entry.answer else 0)
        known = not entry.advantage_varies
        self.varying += entry.advantage_varies
        self.reward.append(float("nan") if reward is None else reward)
        self.advantage.append(entry.advantage if entry.advantage is not None and known else float("nan"))
        if entry.answer:
            self.n_answers += 1
            if right is not None:
                self.answers.put(response.text, entry.answer, right, group, entry.where)
        # Of several turns some tokens were not sampled, and have no log-probability.
        if entry.logprobs is not None and entry.response_ids is not None and entry.sampled is None:
            self.logprobs.put(policy, prompt.ids, response.ids, entry.logprobs, entry.where)

    def state(self, file: Path) -> dict[str, Any]:
        """What was seen of a part of the log, as JSON has it; numbers of every trajectory go into a file."""
        values = {name: np.asarray(getattr(self, name)) for name in _NUMBERS}
        numbers = np.zeros(len(self.group), dtype=[(name, value.dtype) for name, value in values.items()])
        for name, value in values.items():
            numbers[name] = value
        with file.open("wb") as to:
            np.save(to, numbers, allow_pickle=False)
        return {
            "n_answers": self.n_answers,
            "varying": self.varying,
            "prompts": self.prompts.state(),
            "answers": self.answers.state(),
            "logprobs": self.logprobs.state(),
        }

    def add(self, file: Path, state: Mapping[str, Any]) -> None:
        """Take in what was seen of the next part of the log."""
        found = np.load(file, allow_pickle=False)
        for name in _NUMBERS:
            getattr(self, name).frombytes(found[name].tobytes())
        self.n_answers += state["n_answers"]
        self.varying += state["varying"]
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
        return (
            self.prompts.check(),
            self._responses(same_text, logged, place),
            self._advantages(kept, place),
            self._answers(kept, place),
            self._logprobs(),
        )

    def _responses(self, same_text: np.ndarray, logged: np.ndarray, place: Callable[[int], str]) -> Check:
        differ = np.flatnonzero(logged & (same_text == 0))
        n = int((logged & (same_text != 2)).sum())
        note = "the log has no token ids" if not logged.any() else "the log has no texts"
        if n:
            note = "their tokens decode to another text: give the checkpoint that was trained" if len(differ) else ""
        return Check(
            "responses",
            "responses",
            n,
            len(differ),
            len(logged) - n if n else 0,
            place(int(differ[0])) if len(differ) else None,
            bool(len(differ)),
            note,
        )

    def _advantages(self, kept: np.ndarray, place: Callable[[int], str]) -> Check:
        reward, advantage = np.asarray(self.reward), np.asarray(self.advantage)
        if not np.isfinite(advantage).any():
            why = "they differ from token to token" if self.varying else "the log has none"
            return Check("advantages", "groups", 0, 0, note=why)
        rows = np.flatnonzero(kept)
        found = recompute(reward[rows], advantage[rows], np.asarray(self.group)[rows], np.asarray(self.step)[rows])
        compared = found.follow + found.contradict
        notes = [f"{formula} gives those of {n:,}" for formula, n in list(found.formulas.items())[:1]]
        if found.constant:
            notes.append(f"in {found.constant:,} all rewards are equal")
        if found.contradict:
            notes.append(
                "no formula gives the advantages of the others from their rewards: rewards may have weights, or other "
                "columns were used (--rewards), or rows are mixed up"
            )
        if not compared:
            notes = ["they follow no formula that is known, or groups lack members"]
            if not np.isfinite(reward).any():
                notes = ["the log has no rewards"]
        first = None if found.first is None else place(int(rows[found.first]))
        return Check(
            "advantages",
            "groups",
            compared,
            found.contradict,
            found.unclear,
            first,
            bool(found.contradict),
            "; ".join(notes),
        )

    def _answers(self, kept: np.ndarray, place: Callable[[int], str]) -> Check:
        if not self.n_answers:
            return Check("answers", "responses", 0, 0, note="the log has no reference answers")
        rows = np.flatnonzero(kept)
        told, several, first = several_answers(*(np.asarray(v)[rows] for v in (self.asked, self.answer, self.step)))
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
        example = found.first if found.first or first is None or not mixed else place(int(rows[first]))
        # Where prompts are mixed up, these are what disagrees.
        compared, differ = (found.compared, found.differ) if found.contradicts or not mixed else (told, several)
        return Check(
            "answers",
            "responses of a sample" if found.contradicts or not mixed else "prompts",
            compared,
            differ,
            found.not_compared,
            example,
            found.contradicts or mixed,
            "; ".join(notes),
        )

    def _logprobs(self) -> Check:
        found = self.logprobs.compare()
        note = found.note
        if found.differ:
            note += (
                "; other weights sampled them, or another prompt was read, or fewer tokens were allowed (top-p, top-k)"
            )
        return Check(
            "log-probabilities",
            "trajectories",
            found.compared,
            found.differ,
            example=found.first,
            disagrees=bool(found.differ),
            note=note,
        )


class _Prompts:
    """Encodes prompts of which the log has the token ids anew."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.compared = self.differ = self.unclear = self.logged = 0
        self.first: str | None = None
        self.arguments: Counter[str] = Counter()
        self._known: OrderedDict[int, tuple[bool | None, str]] = OrderedDict()

    def see(self, entry: Entry, prompt: Prompt) -> None:
        if entry.prompt_ids is None:
            return
        self.logged += 1
        if entry.prompt is None:
            return
        said = json.dumps([entry.prompt, dict(entry.template)], sort_keys=True, default=str)
        key = hash64(said, prompt.ids.tobytes())
        if key not in self._known:
            self._known[key] = self.tokens.encodes(entry, prompt.ids)
            if len(self._known) > _KEPT_PROMPTS:
                self._known.popitem(last=False)
        self._known.move_to_end(key)
        same, arguments = self._known[key]
        if same is None:
            self.unclear += 1
            return
        self.compared += 1
        if arguments:
            self.arguments[arguments] += 1
        if not same:
            self.differ += 1
            self.first = self.first or entry.where

    def state(self) -> dict[str, Any]:
        return {**{name: getattr(self, name) for name in _COUNTS}, "first": self.first, "arguments": self.arguments}

    def add(self, state: Mapping[str, Any]) -> None:
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + state[name])
        self.first = self.first or state["first"]
        self.arguments.update(state["arguments"])

    def check(self) -> Check:
        notes = [
            f"{n:,} were rendered with {arguments}, as their tokens show (--template-arguments '{arguments}')"
            for arguments, n in self.arguments.most_common(3)
        ]
        if self.differ:
            notes.append(
                "the chat template gives other tokens: try --template-arguments, such as "
                "'{\"enable_thinking\": false}', --system-prompt, or the checkpoint that was trained"
            )
        if not self.compared:
            notes = ["the log has no token ids" if not self.logged else "the log has token ids alone"]
            if self.unclear:
                notes = ["the chat template renders none of them"]
        return Check(
            "prompts",
            "prompts",
            self.compared,
            self.differ,
            self.unclear if self.compared else 0,
            self.first,
            bool(self.differ),
            "; ".join(notes),
        )


def refuse_disagreement(checks: Sequence[Check], where: Path) -> None:
    """Raise for checks that contradict the log (`ImportConfig.strict`).

    Raises:
        TsaeError: naming them all.
    """
    wrong = [str(check) for check in checks if check.disagrees]
    if wrong:
        raise TsaeError(
            f"does not agree with itself: {'. '.join(wrong)}",
            where=where,
            fix="Mend what is named, or import it without --strict.",
        )
