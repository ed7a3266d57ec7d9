"""Tiny models and what the pipeline makes of them, built once a session."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.builders import ARCHITECTURES, make_rollouts, save_model, save_perturbed, save_series
from support.servers import Hub, hub_here

pytest.register_assert_rewrite("support.logs")

# No pickle is loaded, and nothing asks another machine, here or in a process that a test starts.
_GUARD = Path(__file__).parent / "support" / "guard"
_FORBIDDEN = Path(tempfile.mkdtemp(prefix="tsae-guard-")) / "forbidden"
atexit.register(shutil.rmtree, _FORBIDDEN.parent, ignore_errors=True)
_FORBIDDEN.touch()
os.environ["TSAE_GUARD_LOG"] = str(_FORBIDDEN)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_GUARD), os.environ.get("PYTHONPATH")]))
sys.path.append(str(_GUARD))  # some tests give their children this process's own path
if (_guard := importlib.util.spec_from_file_location("guard", _GUARD / "sitecustomize.py")) and _guard.loader:
    _guard.loader.exec_module(importlib.util.module_from_spec(_guard))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", action="store_true", help="leave out what has passed at this commit; log what passes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("resume"):
        config.pluginmanager.register(_Resume(config))


class _Resume:
    """The names of passed tests lie in build/passed/COMMIT. In a tree with changes all of its tests run."""

    def __init__(self, config: pytest.Config) -> None:
        self.called: set[str] = set()
        self.file: Path | None = None
        if hasattr(config, "workerinput"):
            self.passed = set(config.workerinput["passed"])
            return
        commit, changes = (
            subprocess.run(["git", *words], cwd=config.rootpath, capture_output=True, text=True).stdout.strip()
            for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
        )
        if commit and not changes:
            self.file = config.rootpath / "build" / "passed" / commit
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.touch()
        self.passed = set(self.file.read_text().splitlines() if self.file else ())

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = sorted(self.passed)  # the same for a worker that starts later

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.passed])
        items[:] = [item for item in items if item.nodeid not in self.passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.called.add(report.nodeid)
        if self.file and report.when == "teardown" and report.passed and report.nodeid in self.called:
            with self.file.open("a") as file:
                file.write(f"{report.nodeid}\n")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and self.passed:
            session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """A real LLM as a checkpoint; where it is not installed, the test is skipped."""
    from tsae import Checkpoint, TsaeError, testbed

    try:
        return Checkpoint("base", str(testbed.smollm2()))
    except TsaeError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A test that leaves another number behind would change the bits of the tests after it."""
    yield
    if torch := sys.modules.get("torch"):
        assert torch.get_num_threads() == 1


@pytest.fixture(autouse=True)
def _nothing_forbidden() -> Iterator[None]:
    """The test fails during which a pickle was loaded or another machine was asked, even if the error was caught."""
    before = _FORBIDDEN.stat().st_size
    yield
    if _FORBIDDEN.stat().st_size > before:
        pytest.fail(_FORBIDDEN.read_bytes()[before:].decode(), pytrace=False)


@pytest.fixture(scope="session", params=ARCHITECTURES)
def any_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight checkpoint directory of every architecture."""
    return save_model(tmp_path_factory.mktemp(request.param) / request.param, request.param)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight Llama with the testbed's tokenizer."""
    return save_model(tmp_path_factory.mktemp("llama") / "model")


@pytest.fixture(scope="session")
def series_folder(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """A base and one run."""
    folder = tmp_path_factory.mktemp("series")
    save_perturbed(llama, folder / "base", amount=0.0)
    save_perturbed(llama, folder / "easy-10")
    return save_series(
        folder,
        [
            {"id": "base", "path": "base", "run": None, "step": 0, "trained_on": None},
            {"id": "easy-10", "path": "easy-10", "run": "easy", "step": 10, "trained_on": "easy"},
        ],
    )


@pytest.fixture(scope="session")
def series(series_folder: Path) -> Any:
    from tsae import CheckpointSeries

    return CheckpointSeries.load(series_folder)


@pytest.fixture(scope="session")
def fingerprint(llama: Path) -> str:
    """Of the testbed's tokenizer."""
    from tsae.checkpoints.tokenizers import tokenizer_fingerprint
    from tsae.testbed import make_tokenizer

    return tokenizer_fingerprint(make_tokenizer())


@pytest.fixture(scope="session")
def rollouts(fingerprint: str) -> Any:
    """Twelve problems, three responses of base and of the run to each."""
    return make_rollouts(("base", "easy-10"), tokenizer=fingerprint)


@pytest.fixture(scope="session")
def store(series: Any, rollouts: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """float32 activations of two sites, in several shards."""
    import tsae

    return tsae.capture(
        series,
        rollouts,
        ["blocks.1.hook_resid_post", "blocks.2.hook_resid_post"],
        to=tmp_path_factory.mktemp("store") / "acts",
        config=tsae.CaptureConfig(shard_tokens=200, batch_tokens=128),
        progress=False,
    )


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty memory file system, and a cache of one's own."""
    import fsspec

    from tsae.base import mirror

    fs = fsspec.filesystem("memory")
    fs.store.clear()
    monkeypatch.setenv("TSAE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(mirror, "_mirrors", {})
    monkeypatch.setattr(mirror, "_used", {})
    yield fs
    fs.store.clear()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright
    from run_notebooks import CHROMIUM

    if CHROMIUM is None:
        pytest.skip("no Chromium: install Debian's package chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hugging Face Hub on this machine."""
    with hub_here(monkeypatch, tmp_path / "cache") as found:
        yield found
        assert found.refused == []
