"""Trajectories that a log holds as messages: one prompt and one answer, or more than text can give back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tsae.rollouts.logs.entries.fields import Fields, read_list

_TEXT = {"role", "content"}
_ABOUT = {"id", "source", "model", "metadata"}
"""What Inspect says about a message."""


def is_conversation(value: Any) -> bool:
    """Whether it is a list of messages with a role each."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in value)
    )


def messages_of(value: Any) -> list[dict[str, Any]] | None:
    """Messages, which may be written as JSON, alone or as the only item of a list; None for anything else."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    found = read_list(value)
    return found if is_conversation(found) else None


def asked_or_text(fields: Fields, name: str) -> str | list[dict[str, Any]]:
    """The prompt in a column: messages or a text."""
    value = fields.need(name)
    return asked(value, fields) if is_conversation(value) else fields.text(name)


def only_answer(messages: Any, fields: Fields) -> str:
    """The text of an answer that is one message of the assistant.

    Raises:
        Unusable: for several messages, and for a message with more than text, such as calls of tools, or reasoning
            that the server took out of it.
    """
    if isinstance(messages, str):
        return messages
    if not is_conversation(messages):
        raise fields.unusable("empty", "has no answer")
    if messages[-1].get("content") in (None, []) and not messages[-1].get("tool_calls"):
        raise fields.unusable("empty", "its answer has no text")
    parts = [{name for name, value in message.items() if value not in (None, [], "")} for message in messages]
    others = sorted(set().union(*parts) - _TEXT - _ABOUT)
    content = _text(messages[-1].get("content"))
    if len(messages) > 1 or messages[0]["role"] != "assistant" or others or content is None:
        shown = f" with {', '.join(others)}" if others else ""
        n = f"{len(messages)} message{'s' * (len(messages) > 1)}"
        raise fields.unusable("multi-turn", f"its answer is {n}{shown}, which text does not give back as tokens")
    return content


def asked(messages: Sequence[dict[str, Any]], fields: Fields) -> list[dict[str, Any]]:
    """Messages of a prompt, reduced to role and text.

    Raises:
        Unusable: for a message with more than text.
    """
    found = []
    for message in messages:
        content = _text(message.get("content"))
        others = sorted(name for name in ("tool_calls", "tool_call_id") if message.get(name))
        if content is None or others:
            none = "more than text" if message.get("content") else "no text"
            raise fields.unusable(
                "multi-turn", f"a message of its prompt has {' and '.join(others) or none}, which is not read"
            )
        found.append({"role": str(message["role"]), "content": content})
    return found


def _text(content: Any) -> str | None:
    """A message's text, put together from parts if need be; None if any part is no text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    if not parts or not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
        return None
    return "".join(str(part.get("text", "")) for part in parts)
