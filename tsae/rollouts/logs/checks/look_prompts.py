"""Do logged prompts, encoded again, give the logged token ids?"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tsae.rollouts.logs.checks.check import Check
from tsae.rollouts.logs.entries.entry import Entry
from tsae.rollouts.logs.entries.hashes import hash64
from tsae.rollouts.logs.tokenising.tokens import Prompt, Tokens

_KEPT_PROMPTS = 256


class Prompts:
    """Encodes the prompts that a log has both as token ids and as text or messages."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.found: Counter[str] = Counter()
        """Prompts: logged (with token ids), compared, differ, and unclear (the template renders no such prompt)."""
        self.first: str | None = None
        self.arguments: Counter[str] = Counter()
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
            self.first = self.first or entry.where

    def state(self) -> dict[str, Any]:
        return {"found": self.found, "first": self.first, "arguments": self.arguments}

    def add(self, state: Mapping[str, Any]) -> None:
        self.found.update(state["found"])
        self.first = self.first or state["first"]
        self.arguments.update(state["arguments"])

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
        return Check("prompts", "prompts", n, differ, unclear if n else 0, self.first, differ > 0, "; ".join(notes))
