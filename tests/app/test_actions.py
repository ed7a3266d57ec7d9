"""The one place that loads a module by its name: every command's options have their action."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from tsae.cli import Command, Completion, action


def leaves(kind: Any) -> list[type]:
    """The options of the commands that are run: groups, such as `tsae store`, are not."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        return [leaf for part in get_args(kind) for leaf in leaves(part)]
    group = [field for field in fields(kind) if field.name == "command"]
    return leaves(get_type_hints(kind, include_extras=True)["command"]) if group else [kind]


OPTIONS = [kind for kind in leaves(Command) if kind is not Completion]


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_a_command_has_its_action(kind: type) -> None:
    found = action(kind.__module__.rpartition(".")[2], f"run_{kind.__name__.lower()}")
    assert found.__module__ == kind.__module__.replace(".options.", ".actions.")
    assert get_type_hints(found) == {"options": kind, "return": type(None)}
    assert list(inspect.signature(found).parameters) == ["options"]


def test_all_commands_are_there() -> None:
    assert len(OPTIONS) == 34
