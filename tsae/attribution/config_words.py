"""The words of a settings file by dotted name. A word that a reader does not know makes it stop and ask.

What a trainer's words mean is data: ``verl.toml`` and its like beside this module. A file has

    mine       alternatives, each a list of patterns: settings in which all of one are there are this trainer's
    refused    words that change updates in a way that is not replayed, and the values with which they do not
    known      sections, with all their words that are known: another one that is set is refused
    always     facts of every run of the trainer
    others     tables of our fields, for `Words.take`
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import filter as matching
from functools import cache
from pathlib import Path
from typing import Any

from tsae.base.untrusted import parse_yaml
from tsae.errors import TsaeError

_ELSEWHERE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*([^{}]*))?\}")
"""An interpolation as Hydra leaves it: the value of another word, or a default."""
_UNSAID = (None, "", "null", "None", "none")
_OFF: tuple[Any, ...] = (*_UNSAID, False, 0, "False", "false", [], {}, ())
TRAINERS = ("verl", "nemo_rl", "open_instruct", "prime_rl", "openrlhf", "ms_swift", "trl")
"""TRL is last: its words are transformers', which others use too."""


@cache
def table_of(trainer: str) -> dict[str, Any]:
    """What a trainer's words mean."""
    return tomllib.loads(Path(__file__).parent.joinpath("trainers", f"{trainer}.toml").read_text(encoding="utf-8"))


def trainer_of(settings: Mapping[str, Any]) -> str | None:
    """The trainer whose settings these are; None where none is known."""
    names = [name for name, _ in _flat(settings)]
    for trainer in TRAINERS:
        if any(all(matching(names, one) for one in every) for every in table_of(trainer)["mine"]):
            return trainer
    return None


class Words:
    """Settings by dotted name, such as ``trainer.nnodes``.

    Args:
        settings: as the file has them, nested or with dotted names.
        file: for messages.
        trainer: whose words they are.
        own: what a leading dot of a name in the trainer's table stands for.
    """

    def __init__(self, settings: Mapping[str, Any], file: Path, trainer: str, own: str = "") -> None:
        self.file, self.values, self.own = file, dict(_flat(settings)), own
        self.trainer, self.table = trainer, table_of(trainer)

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these words that has one."""
        for name in names:
            value: Any = self.values.get(name)
            for _ in range(5):
                if not isinstance(value, str) or not (found := _ELSEWHERE.fullmatch(value)):
                    break
                other = self.values.get(found[1])
                value = other if other is not None or found[2] is None else parse_yaml(found[2])
            if value not in _UNSAID:
                return value
        return default

    def number(self, *names: str, default: float | None = None) -> float:
        """The same as a number; a `TsaeError` where it is not one, and where without a default the file has none."""
        value = self.get(*names, default=default)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            what = f"does not say {names[0]}" if value is None else f"{names[0]}={value!r} is not a number"
            fix = "Give the complete settings of the run, as its trainer resolved them: defaults differ by version."
            raise TsaeError(what, where=self.file, fix=fix) from error

    def flag(self, *names: str, default: bool = False) -> bool:
        """The same as yes or no."""
        return str(self.get(*names, default=default)).lower() in ("true", "1", "yes")

    def take(self, section: str, *only: str) -> dict[str, Any]:
        """Values of the fields of a section of the trainer's table, or of some of them, by their names.

        An entry is the trainer's word, or several with | between, of which the first that is there counts. Alone it is
        a number that the file has to hold. In a list a default follows, which says whether the value is a number, a
        whole number, yes or no, or a list of numbers. With "" it is a number or None, and with "?" anything or None.
        Third is what each value means, where others are refused.
        """
        return {ours: self._taken(of) for ours, of in self.table[section].items() if not only or ours in only}

    def _taken(self, entry: str | list[Any]) -> Any:
        if isinstance(entry, str):
            return self.number(*map(self._full, entry.split("|")))
        words, usual, *rest = entry
        names, known = [self._full(name) for name in words.split("|")], rest[0] if rest else None
        if known is not None or usual == "?":
            value = self.get(*names, default=None if usual == "?" else usual)
            if known is not None and str(value) not in known:
                fix = f"Known are {', '.join(known)}."
                raise TsaeError(f"{names[0]}={value} is not known", where=self.file, fix=fix)
            return value if known is None else known[str(value)]
        if isinstance(usual, list):
            return tuple(map(float, self.get(*names, default=usual)))
        if isinstance(usual, bool):
            return self.flag(*names, default=usual)
        if usual == "" and self.get(*names) is None:
            return None
        number = self.number(*names, default=None if usual == "" else usual)
        return int(number) if isinstance(usual, int) else number

    def _full(self, name: str) -> str:
        return self.own + name[1:] if name.startswith(".") else name

    def need(self, name: str, *fine: str, does: str = "it changes the updates") -> None:
        """Refuse a word that changes updates in a way that is not replayed.

        Args:
            name: of the word.
            fine: values beside none, 0 and false with which it does not.
            does: what it does, for the message.
        """
        value = self.get(self._full(name))
        if value not in _OFF and str(value) not in fine:
            what = f"{self._full(name)}={value}: {does}, which is not replayed"
            raise TsaeError(what, where=self.file, fix="Attribute a run without it.")

    def refuse(self) -> Words:
        """Refuse words by the trainer's table, as the head of this module has it; else the same."""
        for section, known in self.table.get("known", {}).items():
            for name, value in self.values.items():
                rest = name.removeprefix(self._full(section))
                if rest != name and rest.split(".")[0] not in known and value not in _OFF:
                    what = f"{name}={value} is not known, and may change the updates"
                    fix = "Attribute a run without it, or file an issue that names it."
                    raise TsaeError(what, where=self.file, fix=fix)
        for name, fine in self.table["refused"].items():
            self.need(name, *fine)
        return self

    def updates(self, rows: float, mini: float) -> int:
        """Updates that a generation of so many rows gives."""
        if mini < 1 or rows % mini:
            what = f"the {rows:g} rows of a generation are not a multiple of the {mini:g} of an update"
            raise TsaeError(what, where=self.file, fix="Correct the batch sizes.")
        return int(rows // mini)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
