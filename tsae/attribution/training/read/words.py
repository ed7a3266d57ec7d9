"""The words of a settings file by dotted name. A word that a reader does not know makes it stop and ask."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tsae.base.untrusted import parse_yaml
from tsae.errors import TsaeError

_T = TypeVar("_T")
_ELSEWHERE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,\s*([^{}]*))?\}")
"""An interpolation as Hydra leaves it: the value of another word, or a default."""
_NOTHING = (None, "", "null", "None", False, 0, [], {}, ())


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
            if value not in (None, "null", "None"):
                return value
        return default

    def number(self, *names: str, default: float | None = None) -> float:
        """The same as a number. Without a default the file has to say it.

        Raises:
            TsaeError: where it does not, or says another thing.
        """
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

    def choice(self, known: Mapping[str, _T], *names: str, default: str | None = None) -> _T:
        """What a word means.

        Raises:
            TsaeError: where its value is not among the known ones.
        """
        value = str(self.get(*names, default=default))
        if value not in known:
            what, fix = f"{names[0]}={value} is not known", f"Known are {', '.join(known)}."
            raise TsaeError(what, where=self.file, fix=fix)
        return known[value]

    def need(self, does: str, name: str, *fine: Any) -> None:
        """Refuse a word that changes updates in a way that is not replayed.

        Args:
            does: what it does, for the message.
            name: of the word.
            fine: values beside none, 0 and false with which it does not.
        """
        value = self.get(name)
        if value not in _NOTHING and str(value) not in ("False", "false", "0.0", *map(str, fine)):
            what = f"{name}={value}: {does}, which is not replayed"
            raise TsaeError(what, where=self.file, fix="Attribute a run without it.")

    def only(self, prefix: str, known: Collection[str]) -> None:
        """Refuse words of a section that are not known, where they have a value that may change an update."""
        for name, value in self.values.items():
            rest = name.removeprefix(prefix)
            if rest != name and rest.split(".")[0] not in known and value not in _NOTHING:
                what = f"{name}={value} is not known, and may change the updates"
                raise TsaeError(
                    what, where=self.file, fix="Attribute a run without it, or file an issue that names it."
                )

    def updates(self, rows: int, mini: int, names: str) -> int:
        """Updates that a generation of rows gives."""
        if not mini or rows % mini:
            raise TsaeError(f"{names}: {rows} rows are not a multiple of {mini}", where=self.file, fix="Correct them.")
        return rows // mini


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
