"""`tsae doctor`: what a run has and lacks, before anything is computed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from support.cli import run
from support.refusals import fails, refuses
from support.servers import hub_here
from tsae import testbed
from tsae.config import RunConfig
from tsae.doctor import Finding, NoBase, check, examine, find_series
from tsae.errors import TsaeError
from tsae.watching import watch

BASE = str(testbed.series().base.path)


def examined(path: Path, to: Path, **options: object) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine(RunConfig(path=path, to=to / "out", **options))}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """The shipped mixed run, to be changed."""
    return Path(shutil.copytree(testbed.mixed_run(), tmp_path / "mixed"))


def test_a_whole_run_lacks_nothing(tmp_path: Path) -> None:
    found = examined(testbed.as_run(tmp_path / "run"), tmp_path)
    assert list(found) == [
        "base", "checkpoints", "log", "success", "tokens", "bands", "settings", "attribution", "device", "disk", "time"
    ]  # fmt: skip
    assert {finding.state for finding in found.values()} == {"ok"}
    assert not any(finding.fix for finding in found.values())
    assert "2,048 trajectories, steps 1 to 32" in found["log"].what
    log = pd.concat(map(pd.read_parquet, (testbed.mixed_run() / "completions").glob("*.parquet")))
    right = log.accuracy_reward.groupby(log.prompt).mean()
    easy, hard = (right >= 0.75).sum(), (right <= 0.25).sum()
    bands = f"easy {easy}, medium {len(right) - easy - hard}, hard {hard}"
    assert bands in found["bands"].what
    assert f"{log.accuracy_reward.gt(0).mean():.0%} of 2,048 are right" in found["success"].what


def test_a_log_that_is_too_large_to_attribute_is_named_before_the_analysis(tmp_path: Path) -> None:
    found = examined(testbed.as_run(tmp_path / "run"), tmp_path, tokens=50_000)["attribution"]
    assert (found.state, "--tokens 50,000 are read" in found.what) == ("note", True)


def test_what_is_missing_is_named_with_the_option_that_adds_it(mixed: Path, tmp_path: Path) -> None:
    shutil.rmtree(mixed / "checkpoint-16")
    (mixed / "checkpoint-32" / "training_args.bin").unlink()
    for file in (mixed / "completions").iterdir():
        table = pd.read_parquet(file).drop(columns="completion_ids")
        table.rename(columns={"format_reward": "one_reward", "accuracy_reward": "other_reward"}).to_parquet(file)
    found = examined(mixed, tmp_path, device="cuda")
    assert found["base"].state == found["device"].state == "missing"
    assert found["settings"].state == found["attribution"].state == "note"
    assert "training_args.bin" in found["settings"].fix
    assert "--base MODEL" in found["base"].fix
    assert found["log"].state == "missing"
    assert "--outcome" in found["log"].fix
    named = examined(mixed, tmp_path, base=BASE, importing={"outcome": "one_reward"})
    assert named["log"].state == named["success"].state == "ok"
    assert named["tokens"].state == "note"


def test_of_a_run_without_a_log_nothing_is_said_of_the_log(mixed: Path, tmp_path: Path) -> None:
    shutil.rmtree(mixed / "completions")
    found = examined(mixed, tmp_path, base=BASE)
    assert found["log"].state == "missing"
    assert not found.keys() & {"success", "tokens", "bands", "attribution"}


def test_a_stand_in_for_the_base_and_thin_bands(mixed: Path, tmp_path: Path) -> None:
    for file in sorted((mixed / "completions").iterdir())[1:]:
        file.unlink()
    found = examined(mixed, tmp_path)
    assert found["base"].state == "note"
    assert "stands in for the base" in found["base"].what
    assert found["bands"].state == "note"
    assert "--bands-from" in found["bands"].fix


NAMING = {
    "verl": ("global_step_{}/actor/huggingface", ".hydra/config.yaml", "actor_rollout_ref: {{model: {{path: {}}}}}"),
    "verl, relative": ("global_step_{}", "config.yaml", "actor_rollout_ref: {{model: {{path: ./{}}}}}"),
    "NeMo-RL": ("step_{}/policy/weights", "step_5/config.yaml",
                "policy: {{model_name: {}}}\ngrpo: {{max_num_steps: 9}}\nloss_fn: {{ratio_clip_min: 0.2}}"),
    "open-instruct": ("run_checkpoints/step_{}", "wandb/run-1/files/config.yaml",
                      "model_name_or_path: {{value: {}}}\nnum_unique_prompts_rollout: {{value: 8}}"),
    "prime-rl": ("weights/step_{}", "configs/rl.toml",
                 "[trainer.model]\nname = '{}'\n[orchestrator]\ngroup_size = 8"),
    "ms-swift": ("v0-20260101-120000/checkpoint-{}", "v0-20260101-120000/args.json",
                 '{{"rlhf_type": "grpo", "num_generations": 8, "model": "{}"}}'),
    "OpenRLHF": ("global_step{}_hf", "recipe.yml", "{{pretrain: {}, init_kl_coef: 0.01}}"),
    "TRL": ("checkpoint-{}", "recipe.yaml", "{{model_name_or_path: {}, num_generations: 8}}"),
    "TRL, its own file": ("checkpoint-{}", "training_args.json",
                          '{{"model_name_or_path": "{}", "num_generations": 8, "trl_version": "1.16.0"}}'),
    "prime-rl, LoRA": ("weights/step_{}", "weights/step_5/lora_adapters/adapter_config.json",
                       '{{"base_model_name_or_path": "{}"}}'),
    "a card": ("checkpoint-{}", "README.md", "---\nlibrary_name: transformers\nbase_model: {}\n---\n# hard\n"),
    "a list on the card": ("checkpoint-{}", "README.md", "---\nbase_model:\n- {}\n---\n"),
}  # fmt: skip


@pytest.mark.parametrize("trainer", NAMING)
def test_the_base_that_a_trainers_own_files_name(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, place, settings = NAMING[trainer]
    monkeypatch.chdir(tmp_path)
    base, file = tmp_path / "models" / "start", tmp_path / "run" / place
    shutil.copytree(BASE, base)
    for step in (5, 9):
        shutil.copytree(testbed.series()["hard-050"].path, tmp_path / "run" / folder.format(step))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(settings.format(base.relative_to(tmp_path) if "relative" in trainer else base))
    series, origin = find_series(RunConfig(Path("run")))
    assert ([c.step for c in series], Path(series.base.path)) == ([0, 5, 9], base)
    assert f"(by {place})" in origin
    # Of a folder that is gone, one sentence says which it was; a lone step has no base then.
    shutil.rmtree(base)
    series, origin = find_series(RunConfig(Path("run")))
    assert [c.step for c in series] == [5, 9]
    assert f"stands in for the base, which is not there; {place} names " in origin
    assert "start as the base, which cannot be used (there is no such folder) (--base)" in origin
    shutil.rmtree(tmp_path / "run" / folder.format(9))
    with pytest.raises(NoBase, match=f"holds one checkpoint, and {place} names .*start as the base, which"):
        find_series(RunConfig(Path("run")))


def test_a_base_on_the_hub_is_looked_up_and_not_fetched(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hub_here(monkeypatch, tmp_path / "cache") as hub:
        hub.add("org/start", Path(BASE))
        (mixed / "README.md").write_text("---\nbase_model: org/start\n---\n")
        found = examined(mixed, tmp_path)
        assert found["base"] == Finding("base", "ok", "the base is org/start (by README.md)")
        assert find_series(RunConfig(mixed, base="org/start"))[1] == "the base is org/start (as asked)"
        size = (Path(BASE) / "model.safetensors").stat().st_size
        assert f"base's weights ({size / 1e6:,.0f} MB) are fetched first, and kept" in found["disk"].what
        assert not list((tmp_path / "cache").rglob("*.safetensors"))
        (mixed / "README.md").write_text("---\nbase_model: org/gone\n---\n")
        found = examined(mixed, tmp_path)
        assert found["base"].state == "note"
        assert "README.md names org/gone as the base, which cannot be used (" in found["base"].what
        assert found["base"].fix.startswith("--base MODEL")


@pytest.mark.slow(ci=True)
def test_options_are_checked_before_anything_is_computed(tmp_path: Path) -> None:
    said: list[str] = []

    def refused(match: str, **options: object) -> None:
        config = RunConfig(path=testbed.mixed_run(), to=tmp_path / "out", base=BASE, **options)
        refuses(match, check, config, said.append)
        assert said
        assert not config.to.exists()

    refused(r"unknown site 'layer 1'.*blocks\.14", site="layer 1")
    refused("blocks.3.hook_resid_post does not exist: the model has blocks 0 to 2", site="blocks.3.hook_resid_post")
    refused("no problem is in the band 'harder'", diff={"bands": ("easy", "harder")})
    refused("--device: gpu is asked for, and torch does not find it here", device="gpu")
    refused("no such file: --bands-from nowhere", bands_from="nowhere")
    refused("no checkpoint 'late'", checkpoints=("late",))
    with pytest.raises(TsaeError, match="--device: cuda:99 is asked for"):
        watch(RunConfig(path=testbed.mixed_run(), to=tmp_path / "out", base=BASE, device="cuda:99"))


@pytest.mark.slow(ci=True)
def test_what_an_analysis_needs_is_said_before_it_begins(tmp_path: Path) -> None:
    """In a process of its own: without torch and transformers, which take seconds to import."""
    script = f"""
import sys
from tsae.cli import main
main(["doctor", {str(testbed.mixed_run())!r}, "--base", {BASE!r}, "--to", {str(tmp_path / "out")!r}])
print(*sorted({{"torch", "transformers", "scipy.stats", "sae_lens"}} & set(sys.modules)), "are imported")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "are imported"
    assert "\ntime         ok " in done.stdout


def test_bands_from_elsewhere(mixed: Path, tmp_path: Path) -> None:
    log = pd.concat(map(pd.read_parquet, (mixed / "completions").glob("*.parquet")))
    prompts = sorted(set(log.prompt))
    data = pd.DataFrame({"problem": prompts, "rate": [(i % 5) / 4 for i in range(len(prompts))]}).iloc[1:]
    data.to_parquet(tmp_path / "data.parquet")
    asked = {"difficulty": tmp_path / "data.parquet", "difficulty_column": "rate", "difficulty_model": "X"}
    found = examined(mixed, tmp_path, base=BASE, source=asked)
    assert found["difficulty"].state == "ok"
    assert f"problems: easy {(data.rate >= 0.75).sum()}, " in found["difficulty"].what
    assert "bands are the difficulty for model X (rate of data.parquet)" in found["difficulty"].what
    assert "1 problems have no band" in found["difficulty"].what
    assert "by the log's own pass rates" in found["bands"].what
    found = examined(mixed, tmp_path, base=BASE, source={**asked, "difficulty_column": "no"})
    assert found["difficulty"].state == "missing"
    assert "has no column no" in found["difficulty"].what


def test_the_command(mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(mixed / "checkpoint-16")
    path, to = str(mixed), str(tmp_path / "out")
    run("doctor", path, "--base", BASE, "--to", to, "--json", "-")
    printed = capsys.readouterr()
    assert [finding["state"] for finding in json.loads(printed.out)["findings"]] == ["ok"] * 11
    assert "attribution  ok" in printed.err
    printed = fails(capsys, "doctor", path, "--to", to)
    assert "-> --base MODEL" in printed.out
    assert "the run lacks base" in printed.err
    assert not Path(to).exists()
