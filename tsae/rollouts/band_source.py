"""Bands from elsewhere: how hard another model found the problems, and how hard their data set calls them.

A problem is hard for a policy, and these bands are not the policy's own. Rollouts keep them beside their own
(`Rollouts.by`), and what shows them says which they are (`tsae.rollouts.bands.bands_label`).

1. A problem is in the file if a row has its id, and no other prompt; else if a row has its prompt. Of prompts white
   space does not count, nor the one text that the training put around every problem.
2. Pass rates become bands by cut-offs, as the policies' own do. Levels that are called easy, medium and hard are bands;
   levels with a number each, from the lowest, are easy, medium and hard for about a third of the problems each.
3. A problem that has two values is refused. One that has none has no band, and is counted.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tsae.base.mirror import local
from tsae.errors import TsaeError
from tsae.rollouts.bands import Bands, by_cutoffs, cut_bands, found_how
from tsae.rollouts.config import BandCutoffs, BandQuantiles, BandSource
from tsae.rollouts.logs.log_files import find_files
from tsae.rollouts.logs.readers import read_rows
from tsae.rollouts.parquet import read_pieces
from tsae.rollouts.schema import BANDS, problem_bands

_IDS = ("problem_id", "id", "unique_id", "uuid", "question_id")
_PROMPTS = ("problem", "prompt", "question", "query", "instruction", "input")
"""Columns of a file that may say which problem a row is; the first of each that is there counts."""
_LEARNED, _LEAST = 8, 12
"""Prompts from which the text around the problems is learned, and letters of the shortest problem that shows it."""


def read_source(source: BandSource) -> pd.DataFrame:
    """Read the file of a source.

    Returns:
        one row a problem or more: id, prompt, rate (NaN where unknown), level (None where unknown, and everywhere if
        the file has no such column); no row where there is no file.

    Raises:
        TsaeError: where it is missing, lacks a column, or holds something else than pass rates.
    """
    if source.difficulty is None:
        return pd.DataFrame()
    path = local(source.difficulty)
    if not path.exists():
        raise TsaeError("no such file", where=path, fix="Give the data set's file (--difficulty).")
    rows, names, found = [], dict[str, None](), set[str]()
    wanted = [name for name in (source.difficulty_column, source.bands_column) if name]
    for file in find_files(path):
        for number, row in read_rows(file):
            names |= dict.fromkeys(row)
            values = {name: _field(row, name) for name in wanted}
            found |= {name for name, value in values.items() if value is not None}
            id, prompt = (
                next((row[name] for name in of if row.get(name) is not None), None) for of in (_IDS, _PROMPTS)
            )
            rate = _rate(values.get(source.difficulty_column or ""), source, f"{file}: row {number}")
            level = values.get(source.bands_column or "")
            rows.append((None if id is None else str(id), _text(prompt), rate, None if level is None else str(level)))
    of_log = source.bands_column is not None and source.bands_column not in found
    missing = [name for name in wanted if name not in found and not (of_log and name == source.bands_column)]
    if missing or (of_log and source.difficulty_column is None):
        what = f"has no column {(missing or wanted)[0]} with a value; it has {', '.join(map(str, names)) or 'no rows'}"
        raise TsaeError(what, where=path, fix="Name one of its columns; a.b is field b of column a.")
    if not {*_IDS, *_PROMPTS} & names.keys():
        what = f"does not say which problem a row is: it has {', '.join(map(str, names))}"
        fix = f"Call the column with ids problem_id, or that with texts problem (or {', '.join(_PROMPTS[1:])})."
        raise TsaeError(what, where=path, fix=fix)
    return pd.DataFrame(rows, columns=["id", "prompt", "rate", "level"])


def asked_problems(tables: Path | Iterable[Any], source: BandSource, known: pd.DataFrame) -> pd.DataFrame:
    """The problems of rollouts: id, prompt, and every level that it has there, one row each.

    Args:
        tables: a file of rollouts, or pieces of Arrow of one.
        source: of the bands. Its column with levels may have been kept from the log as extra/NAME.
        known: of `read_source`.

    Raises:
        TsaeError: where neither the source's file nor the rollouts have its column with levels.
    """
    pieces = read_pieces(tables) if isinstance(tables, Path) else tables
    column = source.bands_column if source.bands_column and _of_log(known) else "level"
    parts = []
    for piece in pieces:
        level = next((name for name in (f"extra/{column}", column) if name in piece.column_names), None)
        if level is None:
            what = f"no column {column!r}; there are {', '.join(piece.column_names)}"
            fix = "Name one of these (--bands-column), or import the log with that column (--keep-columns)."
            raise TsaeError(what, where=tables if isinstance(tables, Path) else "rollouts", fix=fix)
        part = piece.select(["problem_id", "prompt"]).append_column("level", piece[level]).to_pandas()
        parts.append(part.drop_duplicates(["problem_id", "level"]))
    found = pd.concat(parts, ignore_index=True).drop_duplicates(["problem_id", "level"])
    return found.rename(columns={"problem_id": "id"})


def bands_from(
    source: BandSource,
    known: pd.DataFrame,
    problem_id: pd.Series,
    problems: pd.DataFrame,
    where: str | Path,
    cutoffs: BandCutoffs | BandQuantiles | None = None,
) -> list[tuple[Bands, str]]:
    """Bands from elsewhere, and a line about each; those that are contrasted by default come first.

    Args:
        source: of the bands; without columns there are none.
        known: of `read_source`.
        problem_id: of every trajectory.
        problems: of `asked_problems`.
        where: the rollouts, named in messages.
        cutoffs: of pass rates; by default the usual ones, or thirds where these leave a band almost empty.

    Raises:
        TsaeError: where no problem is known there, one has several values, or levels have no order.
    """
    found = []
    file = "" if source.difficulty is None else source.difficulty.name
    matched = _match(problems.drop_duplicates("id"), known, file) if file else {}
    how = {} if not file else {"matched": len(matched), "by_id": sum(by_id for _, by_id in matched.values())}
    if source.difficulty_column is not None:
        rates = {id: _one(id, known.rate.iloc[rows], file) for id, (rows, _) in matched.items()}
        label = f"difficulty for model {source.difficulty_model or source.difficulty_column}"
        about = {"kind": "difficulty", "label": label, "file": file, "column": source.difficulty_column, **how}
        rate = problem_id.map({id: value for id, value in rates.items() if value is not None}).astype(float)
        find = lambda cut: _with_rates(problem_id, rate, cut, about, where)  # noqa: E731
        if cutoffs is None:
            bands, told = by_cutoffs(find)
        else:
            bands, told = find(cutoffs), ""
            bands.check()
        if bands is None:
            fix = "Give a column of pass rates that differ, or other cut-offs (tsae rollouts bands)."
            raise TsaeError(f"gives no bands by {source.difficulty_column}: {told}", where=file, fix=fix)
        found.append((bands, told))
    if source.bands_column is not None:
        about = {"kind": "level", "label": "level of the data set", "column": source.bands_column}
        if _of_log(known):
            levels = problems[problems.level.notna()].groupby("id")["level"].agg(list).to_dict()
        else:
            levels = {id: known.level.iloc[rows].dropna().tolist() for id, (rows, _) in matched.items()}
            about |= {"file": file, **how}
        level = {id: _one(id, values, str(about.get("file", where))) for id, values in levels.items() if values}
        found.append(_with_levels(problem_id, level, source, about, where))
    return found


def _of_log(known: pd.DataFrame) -> bool:
    """Whether levels are the log's: what `read_source` found has none."""
    return known.empty or bool(known.level.isna().all())


def _with_rates(
    problem_id: pd.Series, rate: pd.Series, cutoffs: BandCutoffs | BandQuantiles, about: dict[str, Any], where: Any
) -> Bands:
    of_problems = rate.groupby(problem_id.to_numpy()).first().dropna()
    used = cutoffs.cutoffs(of_problems.to_numpy()) if len(of_problems) else BandCutoffs()
    rows = pd.DataFrame({"problem_id": problem_id.to_numpy(), "band": cut_bands(rate, used).to_numpy()})
    info: dict[str, Any] = {"easy": used.easy, "hard": used.hard}
    if isinstance(cutoffs, BandQuantiles):
        info["quantiles"] = {"easy": cutoffs.easy, "hard": cutoffs.hard}
    return _bands(rows.assign(pass_rate=rate.to_numpy()), {**info, "source": about}, where)


def _with_levels(
    problem_id: pd.Series, level: Mapping[str, str], source: BandSource, about: dict[str, Any], where: Any
) -> tuple[Bands, str]:
    counts = Counter(level[id] for id in problem_id.unique() if id in level)
    bands = source.named_levels or _ordered(counts, source.bands_column or "", where)
    of = {name: band for band, names in bands.items() for name in names}
    band = problem_id.map({id: of.get(name) for id, name in level.items()}).astype(object)
    rows = pd.DataFrame({"problem_id": problem_id.to_numpy(), "band": band.where(band.notna(), None).to_numpy()})
    found = _bands(rows.assign(pass_rate=np.nan), {"source": {**about, "levels": bands}}, where)
    n = problem_bands(rows).value_counts()
    if n.empty:
        what = f"no problem has one of the levels {', '.join(of)}; there are {', '.join(counts) or 'none'}"
        raise TsaeError(what, where=where, fix="Name a column with levels (--bands-column), and its levels.")
    told = "; ".join(f"{name} {n.get(name, 0):,} ({', '.join(bands.get(name, ()))})" for name in BANDS if name in bands)
    return found, f"problems: {told}; {found_how(found.info)}"


def _ordered(counts: Mapping[str, int], column: str, where: Any) -> dict[str, list[str]]:
    """Levels by band: by their names, or by the one number in each, in three parts that are as equal as can be."""
    if len(counts) > 1 and all(name.lower() in BANDS for name in counts):
        return {band: [name for name in counts if name.lower() == band] for band in BANDS}
    numbers = {name: re.findall(r"(?:(?<!\w)-)?\d+(?:\.\d+)?", name) for name in counts}
    if len(counts) < 2 or any(len(found) != 1 for found in numbers.values()):
        some = ", ".join(sorted(counts)[:8]) or "none"
        what = f"the levels in {column} have no order that is known: {some}"
        fix = "Say which are which: --bands-levels easy=A,B medium=C hard=D"
        raise TsaeError(what, where=where, fix=fix)
    names = sorted(counts, key=lambda name: float(numbers[name][0]))
    if len(names) == 2:
        return {"easy": names[:1], "hard": names[1:]}
    sizes, total = np.array([counts[name] for name in names]), sum(counts.values())

    def uneven(cut: tuple[int, int]) -> tuple[float, int]:
        parts = [int(part.sum()) for part in np.split(sizes, cut)]
        return round(sum(abs(part / total - 1 / 3) for part in parts), 9), abs(parts[0] - parts[2])

    low, high = min(combinations(range(1, len(names)), 2), key=uneven)
    return {"easy": names[:low], "medium": names[low:high], "hard": names[high:]}


def _bands(rows: pd.DataFrame, info: dict[str, Any], where: Any) -> Bands:
    rows[["pass_rate_low", "pass_rate_high"]] = np.nan
    base = {"reference": None, "separate": True, "cross_fitted": False, "halved": 0}
    return Bands(rows, {**base, "unbanded": int(problem_bands(rows).isna().sum()), **info}, where)


def _one(id: str, values: Iterable[Any], file: str) -> Any:
    """The one value of a problem; None where it has none."""
    known = list(dict.fromkeys(value for value in values if value is not None and value == value))
    if len(known) > 1:
        what = f"gives problem {id[:80]!r} several values: {', '.join(map(str, known[:4]))}"
        raise TsaeError(what, where=file, fix="Keep one row a problem, or rows that agree.")
    return known[0] if known else None


def _match(problems: pd.DataFrame, rows: pd.DataFrame, file: str) -> dict[str, tuple[list[int], bool]]:
    """Rows of every problem that the file has, and whether they were found by the id."""
    by_id, by_text = dict[str, list[int]](), dict[str, list[int]]()
    texts = [" ".join((text or "").split()) for text in rows.prompt]
    for number, (id, text) in enumerate(zip(rows.id, texts, strict=True)):
        if id is not None:
            by_id.setdefault(id, []).append(number)
        if text:
            by_text.setdefault(text, []).append(number)
    found, left = dict[str, tuple[list[int], bool]](), dict[str, str]()
    for id, prompt in zip(problems.id, problems.prompt, strict=True):
        asked = " ".join((prompt or "").split())
        own = [n for n in by_id.get(id, ()) if not (asked and texts[n]) or texts[n] in asked or asked in texts[n]]
        if own:
            found[id] = own, True
        elif asked in by_text:
            found[id] = by_text[asked], False
        elif asked:
            left[id] = asked
    before, after = _around(list(left.values())[:_LEARNED], by_text)
    for id, asked in left.items():
        inside = asked.removeprefix(before).removesuffix(after).strip()
        if asked.startswith(before) and asked.endswith(after) and inside in by_text:
            found[id] = by_text[inside], False
    if not found:
        what = f"knows none of the {len(problems):,} problems: no id and no prompt is the same"
        raise TsaeError(what, where=file, fix="Give the file of the data set that the run was trained on.")
    return found


def _around(prompts: Iterable[str], known: Iterable[str]) -> tuple[str, str]:
    """The text that most often stands before and after a known problem in these prompts."""
    long = sorted((text for text in known if len(text) >= _LEAST), key=len, reverse=True)
    inside = ((prompt, next((text for text in long if text in prompt), None)) for prompt in prompts)
    pairs = Counter((a, c) for a, b, c in (prompt.partition(text) for prompt, text in inside if text) if b)
    return pairs.most_common(1)[0][0] if pairs else ("", "")


def _field(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of a field inside one: a.b, where a may be JSON; None where there is none."""
    if name in row:
        return row[name]
    for dot in (place for place, letter in enumerate(name) if letter == "."):
        inside = row.get(name[:dot])
        if isinstance(inside, str) and inside.lstrip().startswith("{"):
            try:
                inside = json.loads(inside)
            except (ValueError, RecursionError):
                continue
        if isinstance(inside, Mapping) and (found := _field(inside, name[dot + 1 :])) is not None:
            return found
    return None


def _rate(value: Any, source: BandSource, where: str) -> float:
    """A pass rate: a number from 0 to 1, or 3/8; NaN for none."""
    if value is None or value != value or value == "":
        return np.nan
    of = re.fullmatch(r"\s*(\d{1,9})\s*/\s*(\d{1,9})\s*", value) if isinstance(value, str) else None
    try:
        if of is not None:
            rate = int(of[1]) / int(of[2])
        else:
            rate = (
                float(value)
                if source.difficulty_failures_of is None
                else 1 - float(value) / source.difficulty_failures_of
            )
    except (TypeError, ValueError, ZeroDivisionError):
        rate = -1.0
    if not 0 <= rate <= 1:
        what = f"{source.difficulty_column} is {str(value)[:40]!r}, expected a pass rate from 0 to 1, or such as 3/8"
        fix = "Name a column of pass rates; if it counts failures, say of how many (--difficulty-failures-of 16)."
        raise TsaeError(what, where=where, fix=fix)
    return rate


def _text(prompt: Any) -> str:
    """A prompt's text: of messages, all that users wrote."""
    if not isinstance(prompt, list):
        return "" if prompt is None else str(prompt)
    said = [part.get("content") for part in prompt if isinstance(part, Mapping) and part.get("role") == "user"]
    return "\n".join(text for text in said if isinstance(text, str))
