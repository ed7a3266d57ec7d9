"""Trainings that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.builders import save_model
from support.grpo_loop import ADAPTER, CASES, GrpoLoop, make_log


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., GrpoLoop]:
    """A training by its case and its number of generations; each is made once."""
    folder, made = tmp_path_factory.mktemp("models"), dict[tuple[str, int], GrpoLoop]()

    def of(case: str, n_generations: int = 2) -> GrpoLoop:
        if (case, n_generations) not in made:
            name, settings = CASES[case]
            base = folder / name if (folder / name).is_dir() else save_model(folder / name, name)
            adapter = ADAPTER if case == "LoRA" else None
            made[case, n_generations] = GrpoLoop(base, make_log(settings, n_generations), settings, adapter).run()
        return made[case, n_generations]

    return of
