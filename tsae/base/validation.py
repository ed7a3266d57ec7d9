"""Configs that declare what their fields may hold: ``k: Count = 32``.

A config is a frozen dataclass (`config`), which the command line reads, too. pydantic checks each field against its
type when the config is made. Rules across fields stand in the config's own ``__post_init__``.
"""

from __future__ import annotations

from dataclasses import field
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from tsae.base.files import as_path
from tsae.errors import TsaeError

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
"""At least one."""
Size = Annotated[int, Field(ge=0)]
"""Zero or more."""
Draws = Annotated[int, Field(ge=100, le=10_000_000)]
"""Draws of a bootstrap or a permutation test."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A seed that every generator of random numbers takes."""
Fraction = Annotated[float, Field(ge=0, le=1)]
"""From 0 to 1."""
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Confidence = Annotated[float, Field(gt=0, le=0.999999)]
"""Confidence level of an interval. A value closer to 1 may be rounded to 1, and the ends are then NaN."""
Daily = Annotated[T, "daily"]
"""An option that `--help` shows also where a command has many; `--help-all` shows the others."""
UserPath = Annotated[Path, BeforeValidator(lambda value: value if value is None else as_path(value))]
"""A path as `as_path` understands it."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def config(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass whose fields are checked when it is made. NaN and infinity are refused.

    Raises:
        TsaeError: when the config is made with a value that its field cannot hold; it names the field and the value.
    """
    settings = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, extra="forbid", defer_build=True)
    made: Any = dataclass(frozen=True, config=settings)(cls)
    init = made.__init__

    @wraps(init)
    def checked(self: T, *args: Any, **values: Any) -> None:
        try:
            init(self, *args, **values)
        except ValidationError as error:
            raise TsaeError(_sentence(error, list(made.__dataclass_fields__)), where=cls.__name__) from None
        finally:
            made.__init__ = checked  # at first use, when pydantic builds the schema, it sets an __init__ of its own

    made.__init__ = checked
    return made


def check_content(content: Any, model: type[BaseModel]) -> None:
    """Refuse the content of a file if it is not what a model says; further entries may stand beside it.

    Raises:
        ValueError: names the first field that is wrong.
    """
    try:
        model.model_validate(content, strict=True)
    except ValidationError as error:
        raise ValueError(_sentence(error, [])) from None


_RULES = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "is not finite",
    "literal_error": "must be one of {expected}",
}


def _sentence(error: ValidationError, fields: list[str]) -> str:
    """What is wrong with the first field that is refused."""
    found = error.errors(include_url=False)[0]
    first, *inner = found["loc"]
    first = fields[first] if isinstance(first, int) else first  # Given by its place.
    name, kind = ".".join(map(str, (first, *inner))), found["type"]
    if kind == "missing":
        return f"{name} is missing"
    if kind == "unexpected_keyword_argument":
        return f"{name} is not a field"
    rule = _RULES.get(kind)
    what = rule.format(**found.get("ctx", {})) if rule else found["msg"][0].lower() + found["msg"][1:]
    return f"{name}={found['input']!r}{'' if rule else ':'} {what}"
