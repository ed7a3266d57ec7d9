"""Nonsense on the command line: values that nobody means, and options that were not asked for."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from torments import artefacts
from torments.artefacts import READERS
from tsae import cli

_NONSENSE = ("-1", "0", "1e18", "999999999999", "nan", "x", "", "\u202e", "-", "missing/file", "/dev/null",
             "raw.parquet", "acts", "precious.txt", "precious.json", "precious.parquet")  # fmt: skip


def disturb(rng: np.random.Generator, command: Sequence[str]) -> tuple[str, ...]:
    """The command line with one or two values exchanged for nonsense."""
    words = list(command)
    values = [i for i, word in enumerate(words) if i and words[i - 1].startswith("--")]
    for place in rng.permutation(values)[: rng.integers(1, 3)].tolist():
        words[place] = str(rng.choice(_NONSENSE))
    return tuple(words)


@cache
def options_of(words: tuple[str, ...]) -> tuple[argparse.Action, ...]:
    """The options of a command, from the command line's own parser."""
    with warnings.catch_warnings():  # tyro wants to drop it, and has nothing in its place
        warnings.simplefilter("ignore", DeprecationWarning)
        parser = tyro.extras.get_parser(cli.Command)  # type: ignore[call-overload]
    for word in words:
        commands: Mapping[str, Any] = next(a.choices for a in parser._actions if isinstance(a.choices, Mapping))
        parser = commands[word]
    return tuple(action for action in parser._actions if action.option_strings and action.dest != "help")


def add_options(rng: np.random.Generator, command: Sequence[str]) -> tuple[str, ...]:
    """The command line with one or two more options: a possible choice, a small number, or nonsense."""
    words = []
    for word in command:
        if word.startswith("-") or not word.isalpha() or word in ("acts",):
            break
        words.append(word)
    possible = [action for action in options_of(tuple(words)) if action.option_strings[0] not in command]
    added: list[str] = []
    for place in rng.permutation(len(possible))[: rng.integers(1, 3)].tolist():
        action = possible[place]
        added.append(action.option_strings[0])
        if action.nargs == 0:
            continue
        choices = [str(choice) for choice in action.choices or ("0", "1", "2", "3", "0.5", "base", "all")]
        many = action.nargs in ("*", "+") and rng.random() < 0.5
        for _ in range(2 if many else 1):
            added.append(str(rng.choice(choices if rng.random() < 0.6 else _NONSENSE)))
    return (*command, *added)


def attempt(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """(what was done, what is bad of what follows: nothing where the case is good)."""
    stage = READERS[int(rng.integers(len(READERS)))]
    artefacts.lay_out(stage, made, here)
    command = add_options(rng, stage.command) if rng.random() < 0.5 else disturb(rng, stage.command)
    for name in ("precious.txt", "precious.json", "precious.parquet"):
        (here / name).write_text('{"precious": 1}')
    _, wrong = artefacts.watched(command, here)
    return f"tsae {' '.join(map(repr, command))}", wrong
