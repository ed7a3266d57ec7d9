"""Nonsense on the command line: values that nobody means, options that were not asked for, and commands put together
at random from what the command line's own parser knows."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import tyro

from torments import artefacts
from torments.stages import ARTEFACTS, SITE, STAGES
from tsae import cli

_NONSENSE = ("-1", "0", "1e18", "999999999999", "nan", "x", "", "\u202e", "-", "missing/file", "/dev/null",
             "raw.parquet", "acts", "out", ".", "precious.txt", "precious.json", "precious.parquet")  # fmt: skip
_POSSIBLE = ("0", "1", "2", "3", "0.5", "base", "hard-100", SITE, "tsae.testbed.verifier:verify", "os:getcwd", "1/2",
             "series/base", "out/more", *ARTEFACTS)  # fmt: skip
_NOT_DRAWN = ("--executor", "--ray", "--server.url", "--open", "--training.log-to", "--log-to")
"""Options that ask others: a cluster, a server, a browser."""


def disturb(rng: np.random.Generator, command: Sequence[str]) -> tuple[str, ...]:
    """The command line with one or two values exchanged for nonsense."""
    words = list(command)
    values = [i for i, word in enumerate(words) if i and words[i - 1].startswith("--")]
    for place in rng.permutation(values)[: rng.integers(1, 3)].tolist():
        words[place] = str(rng.choice(_NONSENSE))
    return tuple(words)


@cache
def _parser() -> argparse.ArgumentParser:
    with warnings.catch_warnings():  # tyro wants to drop it, and has nothing in its place
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(cli.Command)  # type: ignore[call-overload]


def _below(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    """The commands of a parser, by name."""
    return next((dict(a.choices) for a in parser._actions if isinstance(a.choices, Mapping)), {})


@cache
def commands() -> Mapping[tuple[str, ...], argparse.ArgumentParser]:
    """Every command of the command line, by its words."""
    found: dict[tuple[str, ...], argparse.ArgumentParser] = {}
    left: list[tuple[tuple[str, ...], argparse.ArgumentParser]] = [((), _parser())]
    while left:
        words, parser = left.pop()
        below = _below(parser)
        left += [((*words, name), one) for name, one in below.items()]
        if not below:
            found[words] = parser
    return dict(sorted(found.items()))


def options_of(command: Sequence[str]) -> tuple[argparse.Action, ...]:
    """The options of a command line's command."""
    words = next(words for words in commands() if tuple(command[: len(words)]) == words)
    return tuple(a for a in commands()[words]._actions if a.option_strings and a.dest != "help"
                 and not set(a.option_strings) & set(_NOT_DRAWN))  # fmt: skip


def _option(rng: np.random.Generator, action: argparse.Action) -> list[str]:
    """An option with a possible choice, a small number, an artefact, or nonsense."""
    words = list(action.option_strings[:1])
    if action.nargs == 0:
        return words
    choices = [str(choice) for choice in action.choices or _POSSIBLE]
    wanted = action.nargs if isinstance(action.nargs, int) else 2 if action.nargs in ("*", "+") else 1
    for _ in range(wanted if rng.random() < 0.7 else 1):
        words.append(str(rng.choice(choices if rng.random() < 0.7 else _NONSENSE)))
    return words


def add_options(rng: np.random.Generator, command: Sequence[str]) -> tuple[str, ...]:
    """The command line with one to three more options."""
    possible = [action for action in options_of(command) if action.option_strings[0] not in command]
    chosen = rng.permutation(len(possible))[: rng.integers(1, 4)].tolist()
    return (*command, *(word for place in chosen for word in _option(rng, possible[place])))


def invent(rng: np.random.Generator) -> tuple[str, ...]:
    """A command with all that it requires, and some options, each with a value drawn."""
    known = {words: parser for words, parser in commands().items() if words != ("demo",)}  # takes minutes
    words = list(known)[int(rng.integers(len(known)))]
    found = [*words, *(["--once"] if words == ("watch",) else [])]  # else it waits for ever, as it should
    for action in known[words]._actions:
        if not action.option_strings:
            found.append(str(rng.choice([str(c) for c in action.choices or ARTEFACTS])))
        elif action.dest == "to" and rng.random() < 0.8:
            found += [
                action.option_strings[0],
                f"out/{rng.choice(['made', 'made.parquet', 'made.html', 'made.jsonl'])}",
            ]
        elif action.required and action.dest != "help":
            found += _option(rng, action)
    return add_options(rng, found) if rng.random() < 0.7 and options_of(found) else tuple(found)


@cache
def _odd_numbers() -> tuple[tuple[str, ...], ...]:
    """Every numeric option of every command with numbers that nobody means."""
    found: list[tuple[str, ...]] = []
    first: dict[tuple[str, ...], tuple[str, ...]] = {}
    for stage in STAGES:
        named = stage.command[: 1 if stage.command[1].startswith("--") else 2]
        first.setdefault((*named, *(word for word in stage.command if word.startswith("--live"))), stage.command)
    for command in first.values():
        for action in options_of(command):
            kind = str(action.metavar)
            if "FLOAT" not in kind and "INT" not in kind:
                continue
            option, n = action.option_strings[0], action.nargs if isinstance(action.nargs, int) else 1
            for value in ("-1", "0", "1e18", "nan") if "FLOAT" in kind else ("-1", "0", "999999999999"):
                found.append((*_without(command, option), option, *[value] * n))
    return tuple(found)


def _without(command: Sequence[str], option: str) -> tuple[str, ...]:
    """The command line without an option and its values."""
    if option not in command:
        return tuple(command)
    place = command.index(option)
    after = next((i for i in range(place + 1, len(command)) if command[i].startswith("--")), len(command))
    return (*command[:place], *command[after:])


def odd_number(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """`attempt` with one numeric option."""
    return _judged(_odd_numbers()[int(rng.integers(len(_odd_numbers())))], made, here)


def attempt(rng: np.random.Generator, made: Path, here: Path) -> tuple[str, str]:
    """(what was done, what is bad of what follows: nothing where the case is good)."""
    command = STAGES[int(rng.integers(len(STAGES)))].command
    how = rng.random()
    command = disturb(rng, command) if how < 0.4 else add_options(rng, command) if how < 0.8 else invent(rng)
    return _judged(command, made, here)


def _judged(command: Sequence[str], made: Path, here: Path) -> tuple[str, str]:
    for name in ARTEFACTS:
        if any(word.split("/")[0] == name for word in command):
            artefacts.copy(made / name, here / name)
    (here / "out").mkdir()
    for name in ("precious.txt", "precious.json", "precious.parquet"):
        (here / name).write_text('{"precious": 1}')
    _, wrong = artefacts.watched(command, here, elsewhere=True)
    return f"tsae {' '.join(map(repr, command))}", wrong
