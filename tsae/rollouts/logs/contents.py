"""What a log holds: who sampled each trajectory, what was right, what was assumed, what is to be said of the whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.logs.detect import Format
from tsae.rollouts.logs.entry import Entry, Unusable
from tsae.rollouts.logs.files import LogFile
from tsae.rollouts.logs.ledger import Ledger, hash64
from tsae.rollouts.logs.outcome import Outcomes
from tsae.rollouts.logs.parts import Part
from tsae.rollouts.logs.policies import Policies
from tsae.rollouts.logs.second_look import SecondLook
from tsae.rollouts.logs.summary import Summary
from tsae.rollouts.logs.tokens import Prompt, Tokens
from tsae.rollouts.responses.thinking import told
from tsae.rollouts.responses.token_parts import COLUMN
from tsae.rollouts.schema import outcome_name

_STOPPED = "responses stop without an end token, and the log does not say that they were cut off"
_LEDGER, _LOOK = "ledger", "look.npy"


class Contents:
    """What a log holds, or a part of it.

    Args:
        form: of the log.
        files: all of the log's; of a part none are given, as they belong to their runs already.
        series: the checkpoints.
        tokens: of the base.
        config: of the import.
        folder: for the ledger of a part, and for numbers of its trajectories.
        notes: what is to be said of the files.
    """

    def __init__(
        self,
        form: Format,
        files: Sequence[LogFile],
        series: CheckpointSeries,
        tokens: Tokens,
        config: ImportConfig,
        folder: Path | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.form, self.tokens, self.config = form, tokens, config
        self.ledger = Ledger(None if folder is None else folder / _LEDGER)
        self.folder, self.notes = folder, [*series.notes, *notes]
        self.policies = Policies(series, files, config.run, synchronous=form.synchronous)
        self.outcomes = Outcomes(config, a_file_a_step=form.a_file_a_step)
        self.look = SecondLook(tokens, self.policies.checkpoints)
        self.extra_names: dict[str, None] = {}
        self.kept = np.zeros(0, dtype=bool)
        self.retokenised = self.without_end = 0
        self.has: Counter[str] = Counter()
        """Trajectories that the log says a thing of."""
        self.assumed: Counter[str] = Counter()
        """What was taken for granted, and for how many trajectories."""
        self.empty: list[int] = []
        """Numbers of files that hold nothing."""

    def records(self, part: Part) -> Iterator[tuple[dict[str, Any], int]]:
        """The rows of the table, in the order of the log, each with the bytes of the part that were read so far."""
        before = 0
        for number, file in enumerate(part.files, part.first):
            empty = file.start == 0
            for found in self.form.read(file, self.config):
                empty = False
                try:
                    if isinstance(found, Unusable):
                        raise found
                    yield self._record(found, file, number), before + file.seen.bytes
                except Unusable as unusable:
                    if unusable.kind not in self.config.skip:
                        raise
                    self.ledger.skipped[unusable.kind] += 1
            before += file.seen.bytes
            if empty:
                self.empty.append(number)

    def state(self) -> dict[str, Any]:
        """What was found in a part of the log, as JSON has it; numbers of every trajectory go into its folder."""
        assert self.folder is not None
        return {
            "ledger": self.ledger.close(),
            "policies": self.policies.state(),
            "outcomes": self.outcomes.state(),
            "extra_names": list(self.extra_names),
            "retokenised": self.retokenised,
            "without_end": self.without_end,
            "has": self.has,
            "assumed": self.assumed,
            "empty": self.empty,
            "look": self.look.state(self.folder / _LOOK),
        }

    def add(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take in what was found in a further part, whose ledger lies in a folder."""
        self.ledger.add(folder / _LEDGER, state["ledger"])
        self.policies.add(state["policies"])
        self.outcomes.add(state["outcomes"])
        self.extra_names.update(dict.fromkeys(state["extra_names"]))
        self.retokenised += state["retokenised"]
        self.without_end += state["without_end"]
        self.has.update(state["has"])
        self.assumed.update(state["assumed"])
        self.empty += state["empty"]
        self.look.add(folder / _LOOK, state["look"])

    def summary(self, path: Path) -> Summary:
        """Check the whole, and say what it was."""
        if not len(self.ledger):
            left = ", ".join(f"{n} {kind}" for kind, n in self.ledger.skipped.items())
            raise TsaeError(
                "holds no trajectories" + (f" but those left out: {left}" if left else ""),
                where=path,
                fix="Give a log with at least one row.",
            )
        if self.config.outcome is not None and self.config.outcome not in self.outcomes.names:
            raise TsaeError(
                f"no row has a reward {self.config.outcome!r}; there are {', '.join(self.outcomes.names) or 'none'}",
                where=path,
                fix="Name one of these as --outcome.",
            )
        absent = [name for name in self.config.keep_columns if name not in self.extra_names]
        if absent:
            raise TsaeError(
                f"no row has a column {absent[0]!r} to keep",
                where=path,
                fix="Name columns that are there (--keep-columns).",
            )
        trips = self.ledger.same_text
        if not trips[True] and trips[False]:
            raise TsaeError(
                f"not one of its {trips[False]} responses decodes to the logged text",
                where=path,
                fix=f"Check that {self.tokens.path} is the checkpoint that was trained.",
            )
        self.kept = self.ledger.kept(self.policies.files, self.config, copies=self.form.name == "trl")
        self.ledger.rename(self.policies.renamed)
        notes = [*self.notes, *self.policies.notes, *self._assumed()]
        found = self.ledger.summary(self.form.title, len(self.policies.files), self.kept, notes)
        place = partial(self.ledger.place, self.policies.files)
        return replace(found, second_look=self.look.checks(*self.ledger.round_trips(), self.kept, place))

    def _assumed(self) -> Iterator[str]:
        if self.empty:
            names = [self.policies.files[number].path.name for number in self.empty]
            shown = ", ".join(names[:3]) + f" and {len(names) - 3:,} more" * (len(names) > 3)
            yield f"{len(names):,} file{'s hold' if len(names) > 1 else ' holds'} no trajectories: {shown}"
        yield from self.policies.assumed()
        for what, n in self.assumed.items():
            yield f"{n:,} {what}"
        lacking = [name for name in _told() if not self.has[name]]
        if lacking:
            yield f"the log has no {' and no '.join(lacking)}"
        for name, n in self.has.items():
            if n < len(self.ledger):
                article = "an" if name[0] in "aeiou" else "a"
                yield f"{n:,} of {len(self.ledger):,} trajectories have {article} {name}; the others do not"
        if self.retokenised:
            yield (
                f"{self.retokenised:,} responses were tokenised from text: equal text, not surely the tokens that were "
                "sampled (round_trip is false)"
            )
        if self.without_end:
            yield (
                f"{self.without_end:,} responses have no end token: the log does not say which ended by themselves "
                "(--max-response-tokens, if you know the run's limit)"
            )
        yield from self.outcomes.notes(len(self.ledger), self.ledger.outcomes["unknown"])

    def _record(self, entry: Entry, file: LogFile, file_number: int) -> dict[str, Any]:
        where = entry.where
        if file.step is not None and entry.step is not None and entry.step != file.step:
            raise TsaeError(
                f"is of step {entry.step} in a file of step {file.step}", where=where, fix="Give the log as written."
            )
        entry.step = file.step if entry.step is None else entry.step
        for name, counted in (("step", entry.step), ("the number of the policy's updates", entry.updates)):
            if counted is not None and counted < 0:
                raise TsaeError(f"{name} is {counted}", where=where, fix="Correct or drop that row.")
        if entry.unscored:
            raise Unusable("unscored", "has no reward", where=where)
        prompt, response = self.tokens.prompt(entry), self.tokens.response(entry)
        self.tokens.check_length(prompt, response, where)
        right = self.outcomes.right(entry, response.text)
        found = self.tokens.spans.of(prompt.ids, response.ids, entry.sampled)
        reward = self.outcomes.reward(entry)
        if reward is None and right is not None:
            reward = float(right)
        problem, policy = entry.problem_id or _problem(entry, prompt), self.policies.policy(entry, file)
        self.assumed.update(
            prompt.assumed if entry.assumed is None else (f"responses {entry.assumed}", *prompt.assumed)
        )
        self.assumed.update(told(found, entry.sampled))
        if not response.logged and not entry.response_rendered and self.tokens.lost_markers:
            self.assumed[
                f"responses are text without special tokens, {self.tokens.lost_markers} among them: which of their "
                "tokens are thinking is not known"
            ] += 1
        self.retokenised += not response.logged
        if response.finish_reason == "unknown":
            if response.logged:
                self.assumed[_STOPPED] += 1
            else:
                self.without_end += 1
        self.outcomes.names.update(entry.rewards.keys())
        self.has.update(name for name, told in _told(entry).items() if told)
        self.ledger.enter(
            entry,
            file_number,
            problem,
            policy,
            tokens=(prompt.ids.tobytes(), response.ids.tobytes(), entry.apart),
            finish_reason=response.finish_reason,
            reward=reward,
            outcome=outcome_name(right),
            same_text=response.same_text,
            retokenised=not response.logged,
        )
        self.look.see(
            entry,
            file,
            prompt,
            response,
            problem=problem,
            policy=policy,
            # What the trainer had, whichever rewards or verifier are asked for here.
            reward=entry.reward if entry.reward is not None or self.outcomes.verify is not None else reward,
            right=self.outcomes.logged(entry),
        )
        record = {
            "problem_id": problem,
            "policy": policy,
            "prompt": prompt.text,
            "response": response.text,
            "answer": entry.answer,
            "level": entry.level,
            "prompt_ids": prompt.ids,
            "response_ids": response.ids,
            COLUMN: found.parts,
            "reward": reward,
            "outcome": outcome_name(right),
            "advantage": entry.advantage,
            "finish_reason": response.finish_reason,
            "step": entry.step,
            "round_trip": response.round_trip,
        }
        record |= {f"reward/{name}": value for name, value in entry.rewards.items()}
        self.extra_names.update(dict.fromkeys(entry.extra))
        return record | {f"extra/{name}": value for name, value in entry.extra.items()}


def _told(entry: Entry | None = None) -> dict[str, bool]:
    """What a log may say of a trajectory, and whether it does."""
    entry = entry or Entry("")
    return {
        "reference answer": entry.answer != "",
        "advantage": entry.advantage is not None,
        "problem id": entry.problem_id is not None,
        "number of the policy's updates": entry.updates is not None or entry.policy is not None,
    }


def _problem(entry: Entry, prompt: Prompt) -> str:
    """An id from what is asked and what is right: equal in all logs of one kind."""
    asked = prompt.ids.tobytes() if entry.prompt is None else json.dumps(entry.prompt, sort_keys=True, default=str)
    return f"{hash64(asked, entry.answer):016x}"
