"""The words of a settings file by dotted name. A word that a reader does not know makes it stop and ask."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tsae.base.untrusted import parse_yaml
from tsae.errors import TsaeError

_T = TypeVar("_T")
_ELSEWHERE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*([^{}]*))?\}")
"""An interpolation as Hydra leaves it: the value of another word, or a default."""
_UNSAID = (None, "", "null", "None", "none")
_OFF: tuple[Any, ...] = (*_UNSAID, False, 0, "False", "false", [], {}, ())


class Words:
    """Settings by dotted name, such as ``trainer.nnodes``.

    Args:
        settings: as the file has them, nested or with dotted names.
        file: for messages.
    """

    def __init__(self, settings: Mapping[str, Any], file: Path) -> None:
        self.file, self.values = file, dict(_flat(settings))

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

    def whole(self, *names: str, default: int | None = None) -> int:
        """The same as a whole number."""
        return int(self.number(*names, default=default))

    def flag(self, *names: str, default: bool = False) -> bool:
        """The same as yes or no."""
        return str(self.get(*names, default=default)).lower() in ("true", "1", "yes")

    def take(self, fields: str, section: str = "") -> dict[str, Any]:
        """Values of fields by name.

        Args:
            fields: ``ours=theirs:default``, with spaces between; several of theirs with | between, the first that is
                there counts. The default is JSON, and says whether it is a number, a whole number, or yes or no. With
                null the field is a number or None; without a default the file has to say it.
            section: what their names begin with.
        """
        found: dict[str, Any] = {}
        for field in fields.split():
            ours, _, rest = field.partition("=")
            theirs, _, rest = rest.partition(":")
            names, usual = [section + name for name in theirs.split("|")], json.loads(rest or "null")
            if isinstance(usual, bool):
                found[ours] = self.flag(*names, default=usual)
            elif isinstance(usual, int):
                found[ours] = self.whole(*names, default=usual)
            else:
                missing = rest == "null" and self.get(*names) is None
                found[ours] = None if missing else self.number(*names, default=usual)
        return found

    def choice(self, known: Mapping[str, _T], *names: str, default: str | None = None) -> _T:
        """What a word means; a `TsaeError` where its value is not known."""
        value = str(self.get(*names, default=default))
        if value not in known:
            raise TsaeError(f"{names[0]}={value} is not known", where=self.file, fix=f"Known are {', '.join(known)}.")
        return known[value]

    def need(self, does: str, name: str, *fine: Any) -> None:
        """Refuse a word that changes updates in a way that is not replayed.

        Args:
            does: what it does, for the message.
            name: of the word.
            fine: values beside none, 0 and false with which it does not.
        """
        value = self.get(name)
        if value not in _OFF and str(value) not in map(str, fine):
            what = f"{name}={value}: {does}, which is not replayed"
            raise TsaeError(what, where=self.file, fix="Attribute a run without it.")

    def usual(self, names: str, section: str = "") -> None:
        """Refuse words that change updates in a way that is not replayed.

        Args:
            names: with spaces between, and after = the values with which a word does not, beside none, 0 and false.
            section: what names begin with.
        """
        for name, _, fine in (one.partition("=") for one in names.split()):
            self.need("it changes the updates", section + name, *fine.split("|"))

    def only(self, section: str, known: str) -> None:
        """Refuse words of a section that are not among the known ones, where they may change an update."""
        for name, value in self.values.items():
            rest = name.removeprefix(section)
            if rest != name and rest.split(".")[0] not in known.split() and value not in _OFF:
                what = f"{name}={value} is not known, and may change the updates"
                raise TsaeError(
                    what, where=self.file, fix="Attribute a run without it, or file an issue that names it."
                )

    def updates(self, rows: int, mini: int) -> int:
        """Updates that a generation of so many rows gives."""
        if mini < 1 or rows % mini:
            what = f"the {rows} rows of a generation are not a multiple of the {mini} of an update"
            raise TsaeError(what, where=self.file, fix="Correct the batch sizes.")
        return rows // mini


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
