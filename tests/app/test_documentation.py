"""The README and the site: every block of commands and Python runs, on a tiny run, in the order of the page.

Blocks of `bash` and `python` are executed and `json` is read; `text` is output. A line whose comment says what it
*needs* (a GPU, the hub, …) is parsed by the command line's own parser and not run. Sizes are made small here (SMALL),
and names of what a reader's run has are those of the tiny one (NAMES).
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tsae
from support.builders import save_series
from tsae.cli import main, parse
from tsae.rollouts.problems import write_problems
from tsae.testbed import generate_problems

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SITE = "blocks.1.hook_resid_post"
NAMES = {"blocks.14.hook_resid_post": SITE, "blocks.6.hook_resid_post": "blocks.0.hook_resid_post",
         "blocks.12.hook_resid_post": SITE, "SITE-": f"{SITE}-", "saes/l14": "sae",
         "demo/features": "features", "demo/diff": "diff"}  # fmt: skip
DRAWS = {"--n-bootstrap": "100", "--n-permutations": "100"}
TRAINING = {"--tokens": "6000", "--batch-tokens": "512", "--d-sae": "64", "--k": "4"}
SMALL: dict[str, dict[str, str]] = {
    "demo": {},
    "run": {"--tokens": "12000", "--d-sae": "32", "--k": "4", "--training-tokens": "6000",
            "--diff.n-bootstrap": "100", "--diff.n-permutations": "100", "--tests.features": "1",
            "--tests.problems": "4", "--tests.samples": "1", "--tests.n-random": "1"},
    "watch": {"--tokens": "12000", "--d-sae": "32", "--k": "4", "--training-tokens": "6000",
              "--diff.n-bootstrap": "100", "--diff.n-permutations": "100"},
    "rollouts sample": {"--n-samples": "6", "--max-new-tokens": "40"},
    "rollouts difficulty": {"--n-draws": "100"},
    "train": TRAINING,
    "crosscoder": TRAINING,
    "diff": DRAWS,
    "reinforcement": DRAWS,
    "causal": {"--n-samples": "1", "--max-new-tokens": "8", "--n-random": "1"},
}  # fmt: skip

ARGUMENTS = {
    "tsae.train": {"training": "tsae.TrainingConfig(tokens=6000, batch_tokens=512)"},
    "tsae.RunConfig": {
        "tokens": "12_000", "d_sae": "32", "k": "4", "training_tokens": "6000",
        "diff": "tsae.DiffConfig(n_bootstrap=100, n_permutations=100)",
    },
    "tsae.intervene": {
        "config": "tsae.InterventionConfig(n_random=1, sampling=tsae.SamplingConfig(n_samples=1, max_new_tokens=8))"
    },
}  # fmt: skip
"""The same for Python."""


def sections(page: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Heading and blocks, each a language with its options and a content, of every section that has some to run."""
    parts = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = [
        (part.partition("\n")[0], re.findall(r"^```(\S[^\n]*)\n(.*?)^```$", part, re.MULTILINE | re.DOTALL))
        for part in parts
    ]
    return [(heading, blocks) for heading, blocks in found if any(b[0].split()[0] != "text" for b in blocks)]


SECTIONS = [pytest.param(blocks, id=f"{page.name}: {heading}") for page in PAGES for heading, blocks in sections(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_says_what_it_is(page: Path) -> None:
    fences = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("```")]
    languages = [fence[3:].split()[0] if len(fence) > 3 else "" for fence in fences[::2]]
    assert set(languages) <= {"bash", "python", "json", "text"}
    assert all(fence == "```" for fence in fences[1::2])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that somebody has who follows a page: TRL's run, problems, and what the stages made of them."""
    folder = tmp_path_factory.mktemp("reader")
    shipped, run = tsae.testbed.series_path(), folder / "runs" / "grpo"
    shutil.copytree(shipped / "base", run / "base")
    records: list[dict[str, Any]] = [{"id": "base", "path": "base"}]
    for step in (25, 50, 100):
        shutil.copytree(shipped / f"hard-{step:03d}", run / f"checkpoint-{step}")
        records.append({"id": f"grpo-{step:05d}", "path": f"checkpoint-{step}", "run": "grpo", "step": step})
    save_series(run, records)
    (run / "completions").mkdir()
    for file in sorted((shipped / "logs" / "hard" / "completions").glob("*.parquet"))[:2]:
        shutil.copy(file, run / "completions")
    problems = [p for level, n in {"easy": 6, "medium": 24, "hard": 6}.items() for p in generate_problems(level, n, 0)]
    write_problems(problems, folder / "problems.jsonl")
    stages = """
        tsae rollouts sample --series runs/grpo --problems problems.jsonl --to rollouts.parquet
        tsae rollouts bands --rollouts rollouts.parquet --to banded.parquet
        tsae capture --series runs/grpo --rollouts banded.parquet --sites blocks.1.hook_resid_post --to acts
        tsae train --store acts --to sae
        tsae encode --sae sae --store acts --to features
        tsae diff --features features --tokenizer runs/grpo --to diff
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in stages.strip().splitlines():
            run_line(line.strip(), folder)
    return folder


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("blocks", SECTIONS)
def test_every_command_parses(blocks: list[tuple[str, str]]) -> None:
    for language, content in blocks:
        if language.split()[0] == "python":
            ast.parse(content)
        for line in content.strip().splitlines() if language == "bash" else ():
            run_line(line, Path(), run=False)


# The libraries' own, as in test_rl_trl.py.
@pytest.mark.filterwarnings("ignore:`(is_)?gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("blocks", SECTIONS)
def test_every_block_runs(
    blocks: list[tuple[str, str]],
    reader: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A section that captures begins with what a trainer left; any other goes on from what the stages made.
    lines = [line for _, content in blocks for line in content.splitlines() if "# needs" not in line]
    raw = any("capture" in line for line in lines)
    folder = tmp_path / "reader"
    ignored = shutil.ignore_patterns("acts", "sae", "features", "diff", "*.parquet") if raw else None
    shutil.copytree(reader, folder, ignore=ignored)
    shutil.copytree(reader / "runs", folder / "runs", dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    # A section may speak of the series that one before has loaded.
    space: dict[str, Any] = {"tsae": tsae, "series": tsae.CheckpointSeries.load("runs/grpo")}
    for language, content in blocks:
        kind, _, options = language.partition(" ")
        title = re.search(r'title="(.+?)"', options)
        if title:
            (folder / title[1]).write_text(content, encoding="utf-8")
        elif kind == "python":
            run_python(content, space)
        elif kind == "bash":
            for line in content.strip().splitlines():
                run_line(line, folder)
        elif kind == "json":
            json.loads(content)
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def run_line(line: str, folder: Path, *, run: bool = True) -> None:
    """One command: run, or parsed where it needs what the tests have not, or is about installing."""
    command, _, comment = line.partition(" #")
    command = command.strip()
    for name, ours in NAMES.items():
        command = command.replace(name, ours)
    words = shlex.split(command)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    elif words[0] == "pip":
        extras = re.findall(r"\[(\w+)\]", command)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert set(extras) <= set(project["optional-dependencies"])
    elif words[0] == "python" or words[0].startswith("scripts/"):
        script = words[1] if words[0] == "python" else words[0]
        options = {word for word in words if word.startswith("--")}
        source = (ROOT / script).read_text(encoding="utf-8")
        for option in options:
            assert re.search(rf"\b{option[2:].replace('-', '_')}\b", source), f"{script} has no {option}"
    elif words[0] == "torchrun":
        parse(words[words.index("tsae") + 1 :])
    else:
        assert words[0] == "tsae", f"cannot run {line!r}"
        if "needs" in comment or not run:
            args = words[1 : words.index(">") if ">" in words else None]
            if "--start" in args:  # Parsing reads that SAE's config, which is not there.
                del args[args.index("--start") : args.index("--start") + 2]
            parse(args)
            return
        for name, ours in {
            "other-diff": "diff",
            "acts-of-another": "acts",
            "features-of-all-steps": "features",
        }.items():
            if name in words and not (folder / name).exists():
                shutil.copytree(folder / ours, folder / name)
        if words[1:3] in (["rollouts", "import"], ["rollouts", "sample"]):
            # Two ways to the same rollouts; neither replaces what the other made.
            (folder / words[words.index("--to") + 1]).unlink(missing_ok=True)
        if ">" in words:
            run_redirected(words, folder)
        else:
            main(small(words[1:]))


def run_redirected(words: list[str], folder: Path) -> None:
    """As a shell runs it: standard output into the file, in a process of its own."""
    place = words.index(">")
    with (folder / words[place + 1]).open("w") as out:
        subprocess.run([sys.executable, "-m", *words[:place]], stdout=out, check=True, env=None, timeout=900)


def small(args: list[str]) -> list[str]:
    """The arguments with the sizes of SMALL, shell patterns expanded, and a feature that fires in place of 412."""
    known = next((name for name in SMALL if args[: len(name.split())] == name.split()), None)
    sizes = SMALL[known] if known else {}
    for option, value in sizes.items():
        if option in args:
            args[args.index(option) + 1] = value
        else:
            args += [option, value]
    expanded: list[str] = []
    for word in args:
        matches = sorted(str(path) for path in Path().glob(word)) if "*" in word else []
        expanded += matches or [word]
    if "412" in expanded:
        feature = str(busiest(tsae.FeatureTable.load("features")))
        expanded = [feature if word == "412" else word for word in expanded]
    return expanded


def busiest(features: tsae.FeatureTable) -> int:
    """The feature that fires on most tokens."""
    return int(np.diff(features.columns.indptr).argmax())


class _Small(ast.NodeTransformer):
    """Sizes and names of the tiny run in place of a real one's."""

    numbers = {16_384: 64, 32: 4}  # noqa: RUF012

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if node.value == 412 and isinstance(node.value, int):
            return ast.Name("a_feature", ast.Load())
        if isinstance(node.value, str):
            return ast.Constant(NAMES.get(node.value, node.value))
        return ast.Constant(self.numbers.get(node.value, node.value)) if type(node.value) is int else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        for name, value in ARGUMENTS.get(ast.unparse(node.func), {}).items():
            node.keywords.append(ast.keyword(name, ast.parse(value, mode="eval").body))
        return node


def run_python(content: str, space: dict[str, Any]) -> None:
    """Statement by statement; the feature 412 is one that fires in the features there are by then."""
    lines = content.splitlines()
    for statement in ast.parse(content).body:
        if any("# needs" in line for line in lines[statement.lineno - 1 : statement.end_lineno]):
            continue
        if "features" in space:
            space["a_feature"] = busiest(space["features"])
        if "diff" in space and not Path("other-diff").exists():
            space["diff"].save("other-diff")
        tree = ast.fix_missing_locations(ast.Module([_Small().visit(statement)], []))
        exec(compile(tree, ast.unparse(statement)[:60], "exec"), space)


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is missing: pip install -e '.[docs]'")
@pytest.mark.slow(ci=True)
def test_the_site_builds_and_asks_for_nothing_from_elsewhere(tmp_path: Path) -> None:
    site = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", site],
        cwd=ROOT, check=True, timeout=900, env={"PYTHONPATH": str(ROOT), "PATH": "", "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    pages = list(site.rglob("*.html"))
    reference = "".join(page.read_text(encoding="utf-8") for page in pages if page.parent.name == "api")
    assert [name for name in tsae.__all__ if f'id="tsae.{name}"' not in reference] == []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(script|link|img|iframe)\b[^>]*(src|href)=\"?(https?:)?//", text), page
        # Indented tables of docstrings became code, not fences that are shown.
        assert "```" not in text, page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(\"?(https?:)?//", style.read_text(encoding="utf-8")), style


def test_what_users_ask_for_is_shown_by_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "docs" / "ecosystem.md").read_text().splitlines() if "tests/" in line]
    assert len(rows) == 15
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert len(named) == row.count("tests/") > 0
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text()
