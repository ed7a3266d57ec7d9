"""Trajectories that a log holds as messages alone: one prompt and one answer, or not what text can give back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsae.rollouts.logs.entry import Unusable, is_conversation

_KEPT = {"role", "content"}
_ABOUT = {"id", "source", "model", "metadata"}
"""What Inspect says about a message."""


def only_answer(messages: Any, where: str) -> str:
    """The text of an answer that is one message of the assistant.

    Raises:
        Unusable: for several messages, and for one with more than text, such as calls of tools or reasoning that the
            server took out of it.
    """
    if isinstance(messages, str):
        return messages
    if not is_conversation(messages):
        raise Unusable("empty", "has no answer", where=where)
    if messages[-1].get("content") in (None, []) and not messages[-1].get("tool_calls"):
        raise Unusable("empty", "its answer has no text", where=where)
    parts = [{name for name, value in message.items() if value not in (None, [], "")} for message in messages]
    others = sorted(set().union(*parts) - _KEPT - _ABOUT)
    content = _text(messages[-1].get("content"))
    if len(messages) > 1 or messages[0]["role"] != "assistant" or others or content is None:
        shown = f" with {', '.join(others)}" if others else ""
        raise Unusable(
            "multi-turn",
            f"its answer is {len(messages)} message{'s' * (len(messages) > 1)}{shown}, which text does not give back "
            "as tokens",
            where=where,
        )
    return content


def asked(messages: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Messages of a prompt, with role and text alone.

    Raises:
        Unusable: where one has more than text.
    """
    found = []
    for message in messages:
        content = _text(message.get("content"))
        others = sorted(name for name in ("tool_calls", "tool_call_id") if message.get(name))
        if content is None or others:
            none = "more than text" if message.get("content") else "no text"
            raise Unusable(
                "multi-turn",
                f"a message of its prompt has {' and '.join(others) or none}, which is not read",
                where=where,
            )
        found.append({"role": str(message["role"]), "content": content})
    return found


def _text(content: Any) -> str | None:
    """A message's text; of parts, theirs; None where there is none, or one is an image or anything else."""
    if isinstance(content, str):
        return content
    if (
        not isinstance(content, list)
        or not content
        or not all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    ):
        return None
    return "".join(str(part.get("text", "")) for part in content)
