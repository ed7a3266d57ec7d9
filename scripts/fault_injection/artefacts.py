"""Small real artefacts, what every command makes of them undamaged, and what is bad of how a command ended."""

from __future__ import annotations

import json
import pkgutil
import re
import shutil
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import torch
from organism.mixed import MixedConfig, train

import tsae
from fault_injection import process
from fault_injection.commands import IMPORTS, LOGS, MAKING, SHIPPED, STAGES, Stage, importing
from tsae.base.artefact import file_hash
from tsae.rollouts.problems import write_problems

_TEMPLATE = (
    "{% for m in messages %}<bos>{{ '#' if m['role'] == 'user' else '*' }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>;{% endif %}"
)
_NAMING = ("run.json", "manifest.json", "claims.json", "evaluation.json", "stages.json")
"""Results that say where the base lies."""
_ONCE = ("influence", "analysis", "drift")
"""Artefacts of the first run alone: no command reads them beside others."""


def modules() -> list[str]:
    """What a process imports in advance: all of tsae, and the architecture of the shipped checkpoints."""
    found = pkgutil.walk_packages(tsae.__path__, "tsae.")
    names = [name for _, name, _ in found if not name.startswith(("tsae.testbed.series", "tsae.__main__"))]
    return [*names, "transformers.models.llama.modeling_llama", "plotly.graph_objects", "peft"]


def watched(
    words: Sequence[str | Path],
    here: Path,
    disturbed: Mapping[str, str] | None = None,
    humble: bool = False,
    *,
    elsewhere: bool = False,
) -> tuple[subprocess.CompletedProcess[str] | None, str]:
    """(how a command ended, what is bad of it).

    Outside of "out" it may change nothing that was there, and write nothing but with `elsewhere`.
    """
    before = _outside(here)
    try:
        ended = process.run(words, here, disturbed, humble)
    except subprocess.TimeoutExpired:
        return None, f"takes longer than {process.limit(words)} s"
    except ValueError:
        return None, ""  # no process takes such a word
    after = _outside(here)
    changed = sorted(name for name in {*before, *([] if elsewhere else after)} if before.get(name) != after.get(name))
    return ended, f"changed {', '.join(changed[:4])}" if changed else unusual_end(ended)


def _outside(here: Path) -> dict[str, str]:
    """Checksums of the files outside of "out", by name."""
    files = (path for path in here.rglob("*") if path.is_file() and here / "out" not in path.parents)
    return {path.relative_to(here).as_posix(): file_hash(path) for path in files}


def lay_out(stage: Stage, made: Path, here: Path) -> None:
    """Copy what a stage reads, and make its folder for results."""
    for name in stage.needs:
        copy(made / name, here / name)
    (here / "out").mkdir()
    if stage.begun:
        copy(made / stage.begun, here / "out" / stage.begun)


def copy(source: Path, target: Path) -> None:
    """Copy a file or folder."""
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def clear(folder: Path) -> None:
    """Remove a folder in which there may be folders that nobody may write to."""
    for path in folder.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)


def difference(found: Path, expected: Path, *, extra: bool = False, pattern: str = "*") -> str:
    """Which results differ from those of the undamaged artefacts, if any do. With `extra` more may lie beside them."""
    one, two = results(found, expected.parent), results(expected, expected.parent)
    names = sorted(name for name in {*([] if extra else one), *two} if one.get(name) != two.get(name))
    names = [name for name in names if fnmatch(name, pattern)]
    return f"silently different: {', '.join(names[:4])}" if names else ""


def make(folder: Path) -> None:
    """The artefacts twice, the second time of another run ("other"), and what every stage makes of the first."""
    done, wanted = folder / "done", repr((MAKING, STAGES, IMPORTS))
    if done.is_file() and done.read_text() == wanted:
        return
    _make(folder, 0)
    _make(folder / "other", 1)
    writes = {}
    if (folder / "writes.json").is_file():
        writes = json.loads((folder / "writes.json").read_text())
    for stage in STAGES:
        if writes.get(stage.name, [()])[-1] == list(stage.command):
            continue
        for old in (folder / "out", folder / f"expected-{stage.name}"):
            shutil.rmtree(old, ignore_errors=True)
        (folder / "out").mkdir()
        if stage.begun:
            copy(folder / stage.begun, folder / "out" / stage.begun)
        count = folder / "count"
        start = time.perf_counter()
        _needed(stage.command, folder, {"FAULT": f"count:0:{folder / 'out'}", "FAULT_COUNT": str(count)})
        moments = len(count.read_text().splitlines()) if count.is_file() else 0
        writes[stage.name] = [moments, time.perf_counter() - start, stage.command]
        count.unlink(missing_ok=True)
        clear_words(folder / "out")
        (folder / "out").rename(folder / f"expected-{stage.name}")
        (folder / "writes.json").write_text(json.dumps(writes))
    chat = shutil.copytree(SHIPPED / "base", folder / "chat", dirs_exist_ok=True)
    (chat / "chat_template.jinja").write_text(_TEMPLATE)
    for name in IMPORTS:
        _needed(importing(name, folder / "imported.parquet", LOGS / name, chat), folder)
    done.write_text(wanted)


def _make(folder: Path, seed: int) -> None:
    """The artefacts of one run. Those that are there already are kept."""
    if not folder.is_dir():
        _make_given(folder, seed)
    shutil.rmtree(folder / "out", ignore_errors=True)
    for name, words in MAKING.items():
        if (folder / name).exists() or (seed and name in _ONCE):
            continue
        (folder / "out").mkdir()
        _needed(words, folder)
        # Not the hidden record of the command, nor what parts said.
        made = next(p for p in (folder / "out").iterdir() if p.name[0] != "." and not p.name.endswith(".parts"))
        made.rename(folder / name)
        shutil.rmtree(folder / "out")


def _make_given(folder: Path, seed: int) -> None:
    """What a user brings: problems, checkpoints, and what a trainer leaves."""
    folder.mkdir(parents=True)
    write_problems(tsae.testbed.generate_problems("medium", 16, seed), folder / "problems.jsonl")
    for name in ("base", "hard-100"):
        shutil.copytree(SHIPPED / name, folder / "series" / name)
    trained = {"run": "hard", "step": 100, "trained_on": "hard"}
    _write_series(folder / "series", {"id": "hard-100", "path": "hard-100", **trained})
    shutil.copytree(SHIPPED / "base", folder / "adapters" / "base")
    _write_adapter(folder / "adapters", seed)
    _write_series(folder / "adapters", {"id": "adapter", "path": "adapter", "run": "adapter", "step": 5})
    train(MixedConfig(seed=seed, per_band=2, steps=3, groups=6, samples=4, learning_rate=1e-3),
          tsae.testbed.series().base, folder / "mixed", progress=False)  # fmt: skip


def _needed(words: Sequence[str | Path], where: Path, disturbed: Mapping[str, str] | None = None) -> None:
    """Run a command that must end well."""
    ended = process.run(words, where, disturbed)
    if ended.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} ended with {ended.returncode}:\n{ended.stderr}")


def _write_series(folder: Path, trained: Mapping[str, object]) -> None:
    base = {"id": "base", "path": "base", "run": None, "step": 0, "trained_on": None}
    (folder / "series.json").write_text(json.dumps({"name": "arithmetic", "checkpoints": [base, trained]}))


def _write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of random weights on the base beside it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(folder / "base")
        config = LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", init_lora_weights=False)
        get_peft_model(model, config).save_pretrained(folder / "adapter")
    file = folder / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "base_model_name_or_path": None}))


def clear_words(folder: Path) -> None:
    """Remove what the parts of a command said."""
    for said in folder.glob("*.parts"):
        shutil.rmtree(said)


def results(folder: Path, made: Path) -> dict[str, str]:
    """Checksums of what a command wrote, by name.

    In files that say where the base lies, the folder of the artefacts counts as that of the case, and the checksum,
    which depends on it, is left out.
    """

    def content(path: Path) -> str:
        text = path.read_bytes()
        for here in (folder.parent, made):
            text = text.replace(str(here).encode(), b"@")
        return str(re.sub(rb'"checksum": "[0-9a-f]{32}"', b"", text))

    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: content(path) if path.name in _NAMING else file_hash(path) for name, path in files.items()}


def unusual_end(ended: subprocess.CompletedProcess[str]) -> str:
    """What is bad of how a command ended: a traceback, another exit code than 0 and 2, or 2 without a word."""
    said = ended.stderr.strip()
    if "Traceback" in said:
        return f"traceback: {said.splitlines()[-1]}"
    if ended.returncode == 2:
        return "" if said else "exit code 2 without a word"
    return f"exit code {ended.returncode}: {said[-200:]}" if ended.returncode else ""
