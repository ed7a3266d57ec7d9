"""Thinking, answer and what was not sampled, through every stage: against loops over planted parts."""

from __future__ import annotations

import re
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import tsae
from support.builders import BOS, EOS, feature_table
from support.planted import world
from support.refusals import refuses
from tsae import DiffConfig, FeatureTable, Rollouts
from tsae.activations.batches import Windows
from tsae.activations.shard import Shard
from tsae.activations.store import ActivationStore
from tsae.activations.windows import blocks
from tsae.attribution.sample_gradients import padded
from tsae.checkpoints.loading import Checkpoint
from tsae.checkpoints.series import CheckpointSeries
from tsae.cli import main
from tsae.diff.reinforcement import reinforcement, response_logprobs
from tsae.features.contexts import context
from tsae.report.terminal import gates_text
from tsae.rl.config import CreditConfig, ShapingConfig
from tsae.rl.credit_fitting import ResponseTokens, fit_credit
from tsae.rl.exporting import write_credit
from tsae.rollouts import token_parts
from tsae.rollouts.behaviours import measures
from tsae.rollouts.config import SamplingConfig
from tsae.rollouts.parquet import list_lengths
from tsae.rollouts.problems import Problem
from tsae.rollouts.token_parts import ANSWER, OTHER, THINKING
from tsae.sae.config import SAEConfig, TrainingConfig
from tsae.sae.quality.evaluation import evaluate
from tsae.sae.quality.splice import loss_recovered

SITE = "blocks.1.hook_resid_post"
SPECIAL = (BOS, 18, EOS)
SPANS = ("response", "thinking", "answer", "prompt", "last_prompt", "all")
QUICK = DiffConfig(n_bootstrap=100, n_permutations=200, threads=1)


def planted(rollouts: Rollouts, seed: int = 0) -> Rollouts:
    """With random parts: a third of the responses plain, others with runs of thinking, answer and foreign tokens."""
    rng = np.random.default_rng(seed)
    parts: list[list[int] | None] = []
    for n in rollouts.lengths("response_ids"):
        mine = np.repeat(rng.integers(0, 3, n), rng.integers(1, 4, n))[:n]
        mine[[0, -1]] = rng.integers(0, 2), ANSWER  # the first and the last token were sampled
        parts.append(mine.tolist() if rng.random() < 0.67 else None)
    return rollouts.with_column("parts", parts)


def inside(part: int, token: int, t: int, n_prompt: int, span: str) -> bool:
    """Whether a token is of a span, said once more."""
    if span == "last_prompt":
        return t == n_prompt - 1
    if token in SPECIAL or (t >= n_prompt and part == OTHER):
        return False
    in_response = {"response": True, "all": True, "thinking": part == THINKING, "answer": part == ANSWER}
    return span in ("prompt", "all") if t < n_prompt else in_response.get(span, False)


def tokens_of(rollouts: Rollouts, row: int) -> list[tuple[int, int, int]]:
    """(part, id, position) of the tokens of a trajectory."""
    prompt, response = rollouts.tokens(row)
    parts = rollouts.table["parts"][row].as_py() or [ANSWER] * len(response)
    return list(zip([ANSWER] * len(prompt) + parts, [*prompt, *response], range(10**6), strict=False))


def mask_of(rollouts: Rollouts, row: int, span: str) -> list[bool]:
    n_prompt = len(rollouts.tokens(row)[0])
    return [inside(part, id, t, n_prompt, span) for part, id, t in tokens_of(rollouts, row)]


@pytest.fixture(scope="module")
def thinking(rollouts: Rollouts) -> Rollouts:
    return planted(rollouts).with_advantages()


@pytest.fixture(scope="module")
def acts(series: Any, thinking: Rollouts, tmp_path_factory: pytest.TempPathFactory) -> ActivationStore:
    config = tsae.CaptureConfig(shard_tokens=200, batch_tokens=128, token_statistics=True)
    to = tmp_path_factory.mktemp("thinking") / "acts"
    return tsae.capture(series, thinking, [SITE], to=to, config=config, progress=False)


@pytest.fixture(scope="module")
def sae(acts: ActivationStore) -> Any:
    training = TrainingConfig(tokens=2000, batch_tokens=128, span="thinking")
    return tsae.train(acts, SAEConfig(d_sae=32, k=4), training=training, progress=False)


@pytest.fixture(scope="module")
def table(sae: Any, acts: ActivationStore) -> FeatureTable:
    return tsae.encode(sae, acts, progress=False)


# --- the table


def test_parts_are_kept_by_all_that_a_table_goes_through(thinking: Rollouts, tmp_path: Path) -> None:
    parts = thinking.table["parts"].to_pylist()
    assert Rollouts.read(thinking.write(tmp_path / "a.parquet")).table["parts"].to_pylist() == parts
    rows = np.array([5, 0, 7, 7, 2])
    assert thinking.select(rows).table["parts"].to_pylist() == [parts[row] for row in rows]
    plain = Rollouts(thinking.table.drop_columns("parts"), thinking.info)
    both = Rollouts.concat([plain, thinking])
    assert both.table["parts"].to_pylist() == [None] * len(plain) + parts
    assert both.table["parts"].num_chunks > 1
    expected = [len(thinking.tokens(row)[1]) - (parts[row] or []).count(OTHER) for row in range(len(thinking))]
    assert thinking.frame.response_length.tolist() == thinking.n_sampled.tolist() == expected
    assert both.n_sampled[len(plain) :].tolist() == expected
    assert measures(thinking).response_length.tolist() == expected
    assert "parts" not in thinking.frame
    for source, chosen in ((thinking, rows), (both, rows + len(plain)), (both, np.array([3, len(both) - 1, 3]))):
        found = [part for row in chosen for part, _, _ in tokens_of(source, int(row))]
        assert source.token_parts(chosen).tolist() == found
        assert [source.sampled(int(row)).tolist() for row in chosen] == [
            [part != OTHER for part, _, t in tokens_of(source, int(row)) if t >= len(source.tokens(int(row))[0])]
            for row in chosen
        ]
    assert thinking.has_thinking
    # Activations depend on tokens alone; labels are another matter.
    assert thinking.fingerprint == plain.fingerprint
    assert thinking.labels_fingerprint != plain.labels_fingerprint


def test_a_plain_table_is_what_it_was(rollouts: Rollouts, tmp_path: Path) -> None:
    assert "parts" not in pq.read_schema(rollouts.write(tmp_path / "a.parquet")).names
    assert rollouts.token_parts(np.arange(3)) is None
    assert not rollouts.has_thinking
    assert (rollouts.n_sampled == rollouts.lengths("response_ids")).all()
    # Nor does a column without parts change anything.
    empty = rollouts.with_column("parts", [None] * len(rollouts))
    assert empty.token_parts(np.arange(3)) is None
    assert (empty.labels_fingerprint, empty.parts_fingerprint) == (rollouts.labels_fingerprint, "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[1].append(0), r"row 1 has \d+ parts for \d+ response tokens"),
        (lambda parts: parts[1].__setitem__(0, 3), "holds values other than 0 .answer., 1 .thinking. and 2"),
        (lambda parts: parts[1].__setitem__(0, None), "holds values other than"),
        (lambda parts: parts.__setitem__(1, [OTHER] * len(parts[1])), "row 1 has no sampled token"),
    ],
)
def test_parts_that_do_not_go_with_the_response(rollouts: Rollouts, change: Any, message: str) -> None:
    parts: Any = [[0] * n for n in rollouts.lengths("response_ids")]
    change(parts)
    refuses(message, rollouts.with_column, "parts", parts)


# --- thinking


@pytest.mark.parametrize("span", SPANS)
def test_spans_against_loops(acts: ActivationStore, table: FeatureTable, thinking: Rollouts, span: Any) -> None:
    for shard in acts.shards():
        expected = np.concatenate([mask_of(thinking, int(row), span) for row in shard.trajectory])
        assert shard.token_span(acts.rollouts, span, acts.special_ids).tolist() == expected.tolist()
    expected = np.concatenate([mask_of(thinking, int(row), span) for row in table.trajectory])
    assert table.span_mask(span).tolist() == expected.tolist()
    codes, found = table.codes.toarray(), table.row_means(span).toarray()
    for row in range(0, table.n_rows, 7):
        mine = codes[table.row_offsets[row] : table.row_offsets[row + 1]][
            mask_of(thinking, table.trajectory[row], span)
        ]
        np.testing.assert_allclose(found[row], mine.mean(0) if len(mine) else 0, rtol=1e-5, atol=1e-7)


def test_thinking_is_asked_for_where_there_is_none(
    store: ActivationStore, rollouts: Rollouts, sae: Any, tmp_path: Path
) -> None:
    message = "no response has thinking, by any marker that is known"
    refuses(message, Windows, store, SITE, span="thinking")
    plain = tsae.encode(sae, store, progress=False)
    refuses(message, tsae.feature_diff, plain, replace(QUICK, span="thinking"), progress=False)
    refuses(message, evaluate, sae, store, span="thinking")
    # Without thinking, all of a response is its answer.
    assert plain.span_mask("answer").tolist() == plain.span_mask("response").tolist()


def test_parts_come_into_a_store_without_reading_again(
    series: Any, rollouts: Rollouts, thinking: Rollouts, tmp_path: Path
) -> None:
    for given in (rollouts, thinking):
        found = tsae.capture(series, given, [SITE], to=tmp_path / "acts", progress=False)
    assert found.rollouts.has_thinking
    before = tsae.capture(series, rollouts, [SITE], to=tmp_path / "plain", progress=False)
    assert "parts" not in before.identity(SITE)
    assert found.identity(SITE) == {**before.identity(SITE), "parts": thinking.parts_fingerprint}


# --- training


@pytest.mark.parametrize("span", ["response", "thinking", "answer", "all"])
@pytest.mark.parametrize("partner", ["previous", "earlier"])
def test_batches_hold_the_span_and_no_pair_across_what_lies_between(
    acts: ActivationStore, thinking: Rollouts, span: Any, partner: Any
) -> None:
    windows = Windows(acts, SITE, span=span, window=3, max_norm=1e6, partner=partner)
    values: dict[bytes, list[tuple[int, int, int]]] = {}
    expected, neighbours = [], set()
    for number, shard in enumerate(acts.shards()):
        x = shard.read(SITE, slice(None))
        for place, row in enumerate(shard.trajectory.tolist()):
            mask = mask_of(thinking, row, span)
            for t, counted in enumerate(mask):
                at = int(shard.offsets[place]) + t
                values.setdefault(x[at].tobytes(), []).append((number, place, t))
                if counted:
                    expected.append(x[at].tobytes())
                    if t and mask[t - 1]:
                        neighbours.add((x[at - 1].tobytes(), x[at].tobytes()))
    allowed = set(expected)
    for epoch in range(4):
        seen = []
        for batch in windows.epoch(epoch, 64):
            x = batch.x.numpy()
            seen += [row.tobytes() for row in x]
            everyone = x if batch.others is None else np.concatenate([x, batch.others.numpy()])
            for a, b in batch.pairs.tolist():
                pair = (everyone[a].tobytes(), everyone[b].tobytes())
                assert pair[0] in allowed
                if partner == "previous":
                    assert pair in neighbours
        assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("span", ["thinking", "all"])
def test_live_models_read_the_same_tokens(series: Any, acts: ActivationStore, thinking: Rollouts, span: Any) -> None:
    live = tsae.LiveSource(series, thinking, SITE, config=tsae.LiveConfig(buffer_tokens=4000))
    found = []
    for source in (live, acts):
        windows = source.windows(SITE, span=span, max_norm=1e6)
        rows = [row for batch in windows.epoch(0, 64) for row in batch.trajectory.tolist()]
        found.append((sorted(windows.segments[:, 2].tolist()), sorted(rows)))
    assert found[0] == found[1]


def test_what_was_not_sampled_ends_a_step() -> None:
    ids = np.array([BOS, 1, 2, 3, 4, 5, 6, 7])
    shard = Shard(Path(), "base", "float32", ids, np.array([0, 8]), np.array([0]))
    parts = np.array([0, 0, 0, 2, 2, 0, 1, 0], dtype=np.int8)
    counted = (parts != OTHER) & (ids != BOS)
    # The prompt, the response up to the foreign tokens, and from there on.
    assert blocks(shard, counted, np.array([2]), (99,), parts).tolist() == [0, 1, 2]
    assert blocks(shard, counted, np.array([2]), (99,)).tolist() == [0, 1]
    assert blocks(shard, counted, None, (), parts).tolist() == [0]
    assert blocks(shard, ids >= 0, np.array([2]), (99,), parts).tolist() == [0, 2, 3, 5]


def test_reconstruction_is_measured_on_what_counts(
    sae: Any, acts: ActivationStore, table: FeatureTable, thinking: Rollouts, series: Any
) -> None:
    for record in table.info["readers"]:
        counted = sum(
            sum(mask_of(thinking, int(row), "all")) for shard in acts.shards(record["id"]) for row in shard.trajectory
        )
        assert record["n_tokens"] + round(record["outlier_share"] * counted) == counted
    everything = evaluate(sae, acts, held_out=None, max_norm=1e6)
    slices = {s.value: s.n_tokens for s in everything.slices if s.by == "span"}
    rows = [int(row) for shard in acts.shards() for row in shard.trajectory]
    measured = [row for row in rows if any(a and b for a, b in pairwise(mask_of(thinking, row, "all")))]
    assert slices == {
        span: sum(sum(mask_of(thinking, row, span)) for row in measured)
        for span in ("prompt", "response", "thinking", "answer")
    }
    assert everything.n_tokens == slices["prompt"] + slices["response"]
    only = evaluate(sae, acts, held_out=None, span="thinking", max_norm=1e6)
    assert {s.value for s in only.slices if s.by == "span"} == {"response", "thinking"}


@pytest.mark.parametrize(("span", "targets"), [("all", "response"), ("thinking", "thinking"), ("all", "answer")])
def test_losses_are_of_predictions_of_the_span(
    sae: Any, acts: ActivationStore, thinking: Rollouts, series: Any, span: Any, targets: Any
) -> None:
    rows = [0, 1, 2, 3, 4, 5]
    found = loss_recovered(sae, acts, series["base"], rows, span=span, targets=targets)
    n, losses = 0, []
    model = series["base"].load_model()
    for row in rows:
        prompt, response = thinking.tokens(row)
        ids = torch.tensor([*prompt, *response])[None]
        with torch.no_grad():
            log = model(ids).logits[0].double().log_softmax(-1)
        replaced = mask_of(thinking, row, span)
        parts = [part for part, _, _ in tokens_of(thinking, row)]
        wanted = [
            t >= len(prompt) and part in {"response": (0, 1), "thinking": (1,), "answer": (0,)}[targets]
            for t, part in enumerate(parts)
        ]
        for t in range(len(parts)):
            n += replaced[t] and wanted[min(t + 1, len(parts) - 1)]
            if t + 1 < len(parts) and replaced[t] and wanted[t + 1]:
                losses.append(-log[t, ids[0, t + 1]].item())
    assert found.n_tokens == n
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-4)


# --- features


def test_a_diff_over_thinking_is_one_of_means_over_thinking(table: FeatureTable, thinking: Rollouts) -> None:
    """Train, encode and compare over thinking alone; the means are worked out here from codes and parts."""
    config = replace(QUICK, span="thinking", min_problems=2, minimum_effect=0.0, bands=())
    diff = tsae.feature_diff(table, config, progress=False)
    codes, frame = table.codes.toarray().astype(np.float64), thinking.frame
    by_row: dict[tuple[str, str, str], list[np.ndarray]] = {}
    empty: dict[str, int] = {}
    for row, trajectory in enumerate(table.trajectory.tolist()):
        mine = codes[table.row_offsets[row] : table.row_offsets[row + 1]]
        reader = table.readers[table.reader[row]]
        mask = np.array(mask_of(thinking, trajectory, "thinking"))
        mask &= ~table.outlier[table.row_offsets[row] : table.row_offsets[row + 1]]
        if not mask.any():
            empty[reader] = empty.get(reader, 0) + 1
            continue
        key = (reader, frame.policy[trajectory], frame.problem_id[trajectory])
        by_row.setdefault(key, []).append(mine[mask].mean(0))
    means = {key: np.mean(rows, axis=0) for key, rows in by_row.items()}
    problems = sorted(
        {p for reader, policy, p in means if reader == policy == "base"}
        & {p for reader, policy, p in means if reader == policy == "easy-10"}
    )
    shift = np.mean([means["easy-10", "easy-10", p] - means["base", "base", p] for p in problems], axis=0)
    found = diff.shifts[(diff.shifts.part == "total") & (diff.shifts.outcome == "all")]
    assert len(found) > 5
    np.testing.assert_allclose(found.difference, shift[found.feature], rtol=1e-4, atol=1e-6)
    contrast = diff.contrasts[(diff.contrasts.part == "total") & (diff.contrasts.outcome == "all")].iloc[0]
    assert contrast.n_problems == len(problems)
    # Trajectories that do not think have no mean: left out, and counted.
    assert diff.info["without_span"] == empty
    assert "trajectories without a token of the span (thinking), left out: base" in gates_text(diff, None)


@pytest.mark.slow
def test_every_command_takes_the_span(
    acts: ActivationStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, to = str(acts.path), {name: str(tmp_path / name) for name in ("sae", "features", "diff")}
    size = ["--d-sae", "32", "--k", "4", "--tokens", "1000", "--batch-tokens", "128"]
    main(["train", "--store", store, "--to", to["sae"], "--span", "thinking", *size])
    main(["evaluate", "--sae", to["sae"], "--store", store, "--span", "answer", "--all-problems"])
    main(["encode", "--sae", to["sae"], "--store", store, "--to", to["features"]])
    capsys.readouterr()
    quick = ["--n-bootstrap", "100", "--n-permutations", "200", "--min-problems", "3", "--noise-draws", "0"]
    main(["diff", "--features", to["features"], "--to", to["diff"], "--span", "thinking", "--all", *quick])
    assert "trajectories without a token of the span (thinking), left out: base" in capsys.readouterr().out
    page = tsae.FeatureDiff.load(to["diff"]).to_html(tmp_path / "page.html").read_text(encoding="utf-8")
    assert "mean activation over the thinking tokens of a trajectory" in page
    assert "Trajectories without such a token are left out (of those read by base" in page
    assert "% of its activation in responses on thinking" in page


def test_thinking_and_answer_are_told_apart() -> None:
    """Feature 0 moves in thinking, feature 1 in the answer; the diff over each finds its own."""
    rng = np.random.default_rng(0)
    records, codes = [], []
    for policy, amount in (("base", 0.0), ("run", 2.0)):
        for problem in range(24):
            for _ in range(2):
                records.append(
                    {
                        "problem_id": f"p{problem}", "policy": policy, "prompt_ids": [1, 2],
                        "response_ids": [3, 4, 5, 6, 7], "parts": [1, 1, 2, 0, 0], "outcome": "unknown",
                    }
                )  # fmt: skip
                mine = rng.random((7, 3))
                mine[2:4, 0] += amount
                mine[5:7, 1] += amount
                mine[4] += 50 * amount  # what a tool said
                codes.append(mine)
    n = len(records) // 2
    rollouts = Rollouts.from_records(records)
    readers = [("base", np.arange(2 * n)), ("run", np.arange(2 * n))]
    made = feature_table(rollouts, np.concatenate([*codes, *codes]), readers)
    moved = {}
    for span in ("thinking", "answer", "response"):
        diff = tsae.feature_diff(made, replace(QUICK, span=span, n_permutations=1000), progress=False)
        table = diff.table(kind="shift", checkpoint="run", part="total", discoveries=True)
        moved[span] = set(table[(table.outcome == "all") & (table.delta.abs() > 1)].feature)
        assert "without_span" not in diff.info
        by_part = np.array([[c[2:4].sum(0), c[5:7].sum(0)] for c in codes]).sum(0)
        np.testing.assert_allclose(diff.features.thinking_share, by_part[0] / by_part.sum(0), rtol=1e-5)
    assert moved == {"thinking": {0}, "answer": {1}, "response": {0, 1}}


def test_contexts_show_no_activation_where_nothing_was_sampled(table: FeatureTable, thinking: Rollouts) -> None:
    for row in range(0, table.n_rows, 5):
        shown = context(table, 3, row)
        mask = np.array(mask_of(thinking, shown.trajectory, "all"))
        codes = table.codes[table.row_offsets[row] : table.row_offsets[row + 1]][:, [3]].toarray()[:, 0]
        assert shown.activations.tolist() == (codes * mask).tolist()


def test_reinforcement_leaves_out_what_has_no_such_token(table: FeatureTable) -> None:
    found = reinforcement(table, replace(QUICK, span="thinking", min_problems=2))
    assert "have no token of the span thinking, and count nowhere" in found.notes[0]
    assert (found.rows.n_tokens[found.picked] > 0).all()


# --- log-probabilities and credit


def test_log_probabilities_are_of_sampled_tokens(series: Any, thinking: Rollouts, acts: ActivationStore) -> None:
    rows = np.flatnonzero(thinking.frame.policy == "base")[:9]
    found = response_logprobs(thinking, rows, CheckpointSeries((series["base"],)), batch_tokens=64)
    statistics = tsae.trajectory_statistics(acts).set_index(["reader", "trajectory"])
    model = series["base"].load_model()
    assert found is not None
    for i, row in enumerate(rows.tolist()):
        prompt, response = thinking.tokens(row)
        ids = torch.tensor([*prompt, *response])[None]
        with torch.no_grad():
            log = model(ids).logits[0].double().log_softmax(-1)
        parts = thinking.table["parts"][row].as_py() or [0] * len(response)
        mine = [
            log[len(prompt) - 1 + t, token].item()
            for t, (token, part) in enumerate(zip(response.tolist(), parts, strict=True))
            if part != OTHER
        ]
        assert found[i] == pytest.approx(sum(mine), rel=1e-4)
        told = statistics.loc[("base", row)]
        assert told.n_tokens == len(mine)
        assert told.logprob_reader == pytest.approx(np.mean(mine), rel=1e-4)


def test_influence_is_of_sampled_tokens(thinking: Rollouts) -> None:
    for rows, _, _, response in padded(thinking, np.arange(8), 60, "cpu"):
        for i, row in enumerate(rows.tolist()):
            tokens = tokens_of(thinking, row)
            n_prompt = len(thinking.tokens(row)[0])
            expected = [t >= n_prompt and part != OTHER for part, _, t in tokens]
            assert response[i, : len(tokens)].tolist() == expected
            assert not response[i, len(tokens) :].any()


def test_credit_goes_to_sampled_tokens(tmp_path: Path) -> None:
    plain = world()
    parts = [[0, 0, 2, 0, 1, 0, 0] if row % 2 else None for row in range(len(plain.rollouts))]
    made = replace(plain, rollouts=plain.rollouts.with_column("parts", parts))
    tokens = ResponseTokens.of(made, np.arange(made.n_rows))
    index = np.concatenate([8 * row + 1 + np.array([0, 1, 3, 4, 5, 6] if row % 2 else range(7)) for row in range(8)])
    codes = made.codes.toarray()
    n = len(index)
    assert tokens.ids[:n].tolist() == made.token_ids[index].tolist()
    np.testing.assert_array_equal(tokens.codes[:n].toarray(), codes[index])
    np.testing.assert_array_equal(tokens.states[:n].toarray(), codes[index - 1])
    credit = fit_credit(made, CreditConfig())
    logprob = np.full(len(made.token_ids), -1.0, dtype=np.float32)
    path = write_credit(credit, made, tmp_path / "credit.parquet", ShapingConfig(), logprob=logprob)
    for row in pq.read_table(path).to_pylist()[:40]:
        sampled = np.array([part != OTHER for part in parts[row["trajectory"]] or [0] * 7])
        weights = np.array(row["token_weights"])
        assert (weights[~sampled] == 0).all()
        assert weights[sampled].mean() == pytest.approx(1.0, abs=1e-5)
        assert not np.array(row["token_scores"])[~sampled].any()
        assert not np.array(row["token_advantages"])[~sampled].any()


# --- sampling


def test_sampled_thinking_is_found(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits stand in for markers: the testbed's alphabet has no others."""
    problems = [Problem(id=f"p{i}", prompt=f"{i}+1", answer="1") for i in range(4)]
    sampling = SamplingConfig(n_samples=4, max_new_tokens=24, prompt_format="plain")
    checkpoint = Checkpoint("base", str(llama))
    plain = tsae.sample(checkpoint, problems, sampling, progress=False)
    assert "parts" not in plain.table.column_names
    marks = {"_OPENS": "1", "_FIRST": "(?!)", "_OPENED": r"(1)\s*\Z", "_CLOSED": r"2\s*\Z"}
    stand_ins: dict[str, Any] = {name: re.compile(pattern) for name, pattern in marks.items()}
    stand_ins["MARKERS"] = (token_parts.Markers("1", "1", "2", may_begin_inside=False),)
    for name, stand_in in {**stand_ins, "_CLOSES": [re.compile("2")]}.items():
        monkeypatch.setattr(token_parts, name, stand_in)
    found = tsae.sample(checkpoint, problems, sampling, progress=False)
    assert found.table["response_ids"].to_pylist() == plain.table["response_ids"].to_pylist()
    assert found.has_thinking
    for row in range(len(found)):
        prompt, response = found.tokens(row)
        inside, expected = int(prompt[-1]) == 1, []
        for id in response.tolist():
            expected.append(int(inside or id == 1))
            inside = id != 2 and (inside or id == 1)
        parts = found.table["parts"][row].as_py()
        assert (parts or [0] * len(response)) == expected
        assert (parts is None) == (not any(expected))


def test_memory_of_a_mapped_column(tmp_path: Path) -> None:
    """The parts of some rows come from the mapped file; the column itself is not copied."""
    n, length = 4000, 500
    ids = pa.array(np.zeros(n * length, np.int32))
    offsets = pa.array(np.arange(n + 1, dtype=np.int32) * length)
    columns = {
        "problem_id": [f"p{i % 50}" for i in range(n)], "policy": ["base"] * n, "outcome": ["unknown"] * n,
        "prompt_ids": [[1]] * n, "response_ids": pa.ListArray.from_arrays(offsets, ids),
        "parts": pa.ListArray.from_arrays(offsets, pa.array(np.tile(np.arange(length) % 2, n).astype(np.int8))),
    }  # fmt: skip
    found = Rollouts.read(Rollouts(pa.table(columns)).write(tmp_path / "big.parquet"))
    assert (list_lengths(found.table["parts"]) == length).all()
    tracemalloc.start()
    parts = found.token_parts(np.arange(3000, 3040))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert parts.sum() == 40 * length / 2
    assert peak < n * length / 2  # bytes; the column has n · length of them
