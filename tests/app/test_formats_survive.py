"""Formats, as hypothesis draws them: what is written comes back, is written again with the same bytes, and is in order.

The fast run draws few examples and the slow one many; both draw the same ones every time.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.extra.numpy as hn
import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import torch
from hypothesis import HealthCheck, given, settings
from statements.tables import write_shard

from support.builders import digests, save_model, synthetic_store
from support.logs import LOGS, TEMPLATE
from support.results import reader
from tsae.checkpoints.loading import Checkpoint
from tsae.errors import TsaeError
from tsae.features.feature_table import FeatureTable
from tsae.rollouts.config import ImportConfig
from tsae.rollouts.importing import import_log
from tsae.rollouts.known_logs import KNOWN
from tsae.rollouts.schema import BANDS, OUTCOMES
from tsae.rollouts.table import Rollouts

AMOUNTS = [pytest.param(3, id="few"), pytest.param(80, id="many", marks=pytest.mark.slow)]

texts = st.text(max_size=12)
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)
rewards = st.floats(-1e100, 1e100)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def examples(check: Callable[..., None], amount: int, **strategies: st.SearchStrategy[Any]) -> None:
    """Call a check with so many examples."""
    calm = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    options = settings(max_examples=amount, deadline=None, derandomize=True, database=None, suppress_health_check=calm)
    options(given(**strategies)(check))()


# --- rollouts


@st.composite
def rollouts(draw: st.DrawFn, most: int = 5) -> Rollouts:
    """Any table: odd texts and ids, nulls where they may be, parts, and columns of its own; in one piece or several."""
    own = draw(
        st.dictionaries(
            texts.map(lambda name: f"own/{name}"),
            st.sampled_from([texts, numbers, st.booleans(), st.lists(st.integers(-9, 9), max_size=3)]),
            max_size=2,
        )
    )

    def record() -> dict[str, Any]:
        response = draw(ids)
        parts = st.lists(st.integers(0, 2), min_size=len(response), max_size=len(response))
        parts = parts.filter(lambda found: set(found) != {2})  # the policy sampled something
        return {
            "problem_id": draw(texts),
            "policy": draw(texts),
            "prompt": draw(st.none() | texts),
            "response": draw(st.none() | texts),
            "answer": draw(st.none() | texts),
            "level": draw(st.none() | texts),
            "prompt_ids": draw(ids),
            "response_ids": response,
            "reward": draw(st.none() | rewards),
            "outcome": draw(st.sampled_from(OUTCOMES)),
            "advantage": draw(st.none() | numbers),
            "finish_reason": draw(st.none() | st.sampled_from(["stop", "length", "unknown"])),
            "band": draw(st.none() | st.sampled_from(BANDS)),
            **({"parts": draw(st.none() | parts)} if with_parts else {}),
            **{name: draw(st.none() | values) for name, values in own.items()},
        }

    with_parts = draw(st.booleans())
    info = draw(st.dictionaries(texts, json_values, max_size=3))
    made = Rollouts.from_records([record() for _ in range(draw(st.integers(1, most)))], info)
    return Rollouts.concat([made, made]) if draw(st.booleans()) else made


@pytest.mark.parametrize("amount", AMOUNTS)
def test_rollouts_survive(amount: int) -> None:
    def check(table: Rollouts) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first = table.write(Path(folder, "first.parquet"))
            again = Rollouts.read(first)
            assert again.table.schema.equals(table.table.schema)
            assert again.table.to_pylist() == table.table.to_pylist()
            assert again.info == table.info
            assert again.fingerprint == table.fingerprint
            assert again.write(Path(folder, "second.parquet")).read_bytes() == first.read_bytes()

    examples(check, amount, table=rollouts())


# --- stores


@st.composite
def activations(draw: st.DrawFn) -> tuple[list[np.ndarray], str]:
    """One (n_tokens, d_model) array a trajectory, and the dtype in which it is stored."""
    dtype, width = draw(st.sampled_from(["float32", "float16", "bfloat16"])), draw(st.integers(1, 4))
    most = 2.0**15 if dtype == "float16" else 2.0**120
    elements = st.floats(-most, most, width=32, allow_nan=False)
    lengths = draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    return [draw(hn.arrays(np.float32, (n, width), elements=elements)) for n in lengths], dtype


@pytest.mark.parametrize("amount", AMOUNTS)
def test_stores_survive(amount: int) -> None:
    def check(drawn: tuple[list[np.ndarray], str]) -> None:
        values, dtype = drawn
        with tempfile.TemporaryDirectory() as folder:
            store = synthetic_store(Path(folder, "acts"), values, dtype=dtype)
            (shard,) = store.shards()
            found = shard.read("x.site", slice(None))
            stored = torch.from_numpy(np.concatenate(values)).to(getattr(torch, dtype))
            assert np.array_equal(found, stored.float().numpy())
            norms = stored.float().norm(dim=1).numpy()
            assert np.allclose(shard.norms("x.site"), norms, rtol=1e-5)
            again = Path(folder, "again.h5")
            parts = (shard.token_ids, shard.offsets, shard.trajectory)
            write_shard(again, {"x.site": torch.from_numpy(found)}, dtype, *parts)
            assert again.read_bytes() == shard.path.read_bytes()
            assert [len(text) for text in values] == np.diff(shard.offsets).tolist()
            assert (
                store.rollouts.tokens(len(values) - 1)[1].tolist() == shard.token_ids[shard.offsets[-2] + 1 :].tolist()
            )

    examples(check, amount, drawn=activations())


# --- feature tables


@st.composite
def feature_tables(draw: st.DrawFn) -> FeatureTable:
    """Codes of any sparsity, tokens beyond the norm limit, and features that are never active."""
    table = draw(rollouts(most=3))
    tokens = [np.concatenate(table.tokens(row)) for row in range(len(table))]
    shape = (sum(map(len, tokens)), draw(st.integers(1, 5)))
    elements = st.just(0.0) | st.floats(2**-20, 2**90, width=32)
    codes = draw(hn.arrays(np.float32, shape, elements=elements, fill=st.just(0.0)))
    outlier = draw(hn.arrays(bool, shape[0]))
    codes[outlier] = 0
    return FeatureTable(
        codes=sp.csr_array(codes),
        token_ids=np.concatenate(tokens).astype(np.int32),
        row_offsets=np.cumsum([0, *map(len, tokens)]),
        reader=np.zeros(len(table), dtype=np.int32),
        trajectory=np.arange(len(table)),
        rollouts=table,
        info={"sae": {"d_high": draw(st.integers(0, shape[1]))}, "readers": [reader("base", None)], "special_ids": []},
        outlier=outlier,
    )


@pytest.mark.parametrize("amount", AMOUNTS)
def test_feature_tables_survive(amount: int) -> None:
    def check(table: FeatureTable) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first = table.save(Path(folder, "first"))
            again = FeatureTable.load(first)
            assert (again.codes[:] != table.codes).nnz == 0
            every = again.codes.columns[:, np.arange(table.n_features)]  # type: ignore[union-attr]
            assert (every != sp.csc_array(table.codes)).nnz == 0
            for name in ("token_ids", "row_offsets", "reader", "trajectory", "outlier"):
                assert np.array_equal(getattr(again, name), getattr(table, name)), name
            assert again.info == table.info
            assert again.rollouts.table.to_pylist() == table.rollouts.table.to_pylist()
            assert digests(again.save(Path(folder, "second"))) == digests(first)

    examples(check, amount, table=feature_tables())


# --- importers


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = save_model(tmp_path_factory.mktemp("chat") / "model")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return Checkpoint(id="base", path=str(path))


def in_order(file: Path, vocabulary: int) -> None:
    """What every imported table keeps."""
    found = Rollouts.read(file).table
    found.validate(full=True)  # offsets rise and stay inside, texts are UTF-8
    numbers = [name for name in found.column_names if pa.types.is_floating(found[name].type)]
    for row in found.to_pylist():
        for name in ("prompt_ids", "response_ids"):
            assert row[name]
            assert all(0 <= id < vocabulary for id in row[name])
        if row.get("parts") is not None:
            assert len(row["parts"]) == len(row["response_ids"])
            assert set(row["parts"]) <= {0, 1, 2}
            assert set(row["parts"]) != {2}  # the policy sampled something
        assert row["outcome"] in OUTCOMES
        assert row["finish_reason"] in ("stop", "length", "unknown")
        assert all(row[name] is None or np.isfinite(row[name]) for name in numbers)  # rewards, advantage, its own
        assert row["problem_id"] is not None
        assert row["policy"]
        assert row.get("step") is None or row["step"] >= 0


def imported(log: Path, chat: Checkpoint, to: Path, **config: Any) -> bool:
    """Whether a log could be read; if so, it is in order."""
    try:
        import_log(log, to, chat, ImportConfig(**config), progress=False)
    except TsaeError:
        return False
    in_order(to, max(chat.load_tokenizer().get_vocab().values()) + 1)
    return True


sums = st.text("0123456789+-*=#;.", min_size=1, max_size=10)
plain_rows = st.fixed_dictionaries(
    {"prompt": sums | texts, "response": sums | texts, "correct": st.booleans() | st.none()},
    optional={
        "problem_id": texts,
        "policy": st.sampled_from(["a", "b"]),
        "reward": numbers | st.integers(-3, 3),
        "advantage": numbers,
        "step": st.integers(0, 3),
        "prompt_ids": st.lists(st.integers(-1, 22), max_size=5),
        "response_ids": st.lists(st.integers(-1, 22), max_size=5),
        "response_mask": st.lists(st.integers(0, 1), max_size=5),
        "finish_reason": st.sampled_from(["stop", "length"]) | texts,
    },
)


@pytest.mark.parametrize("amount", AMOUNTS)
def test_plain_logs_are_read_in_order_or_refused(amount: int, chat: Checkpoint) -> None:
    read: list[bool] = []

    def check(rows: list[dict[str, Any]], loose: bool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, "log.jsonl")
            log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
            skip = ("unscored", "errored", "empty") if loose else ()
            read.append(imported(log, chat, Path(folder, "found.parquet"), skip=skip))

    tidy = st.fixed_dictionaries({"prompt": sums, "response": sums, "correct": st.booleans()})
    tables = st.lists(plain_rows, min_size=1, max_size=4) | st.lists(tidy, min_size=1, max_size=4)
    examples(check, amount, rows=tables, loose=st.booleans())
    assert any(read)


ASKED, USER = "<bos>#1+1?<eos><bos>;", [{"role": "user", "content": "1+1?"}]
IDS = [18, 16, 1, 10, 1, 13, 19, 18, 15]  # of ASKED
SHIPPED: dict[str, tuple[str, dict[str, Any]]] = {
    "verl": ("1.jsonl", {}),
    "open-instruct": ("tiny_rollouts_000000.jsonl", {}),
    "nemo-rl": ("train_data_step1.jsonl", {}),
    "open-r1": ("pass_rates.jsonl", {}),
    "prime-rl": ("rollouts/step_1/train/effective/traces.jsonl", {}),
    "prime-rl-stream": ("monitors/file/traces/stream.jsonl", {"format": "prime-rl", "skip": ("errored", "empty")}),
    "prime-rl-tokens": ("token_exports/step_1/rank_0.jsonl", {}),
    "prime-rl-0.6": ("run/rollouts/step_1/train_rollouts.jsonl", {"format": "verifiers"}),
    "trl": ("completions/completions_00001.parquet", {"outcome": "digits", "skip": ("unscored",)}),
    "ms-swift": ("v0-run/completions.jsonl", {}),
    "areal": ("trial/rollout/0/10.jsonl", {}),
    "roll": ("rollout_dump_data.step_0.jsonl", {"skip": ("empty",)}),
    "rllm": ("run/episodes/train_step_1_epoch_0/episode_hashab_ida_0.json", {}),
    "skyrl": ("run/dumped_evals/global_step_0_evals/gsm8k.jsonl", {}),
    "openrlhf": ("out.jsonl", {}),
    "atropos": ("groups.jsonl", {}),
}
"""Logs that are shipped with the tests, and how they are read."""
WRITTEN: dict[str, tuple[str, dict[str, Any]]] = {
    "slime": ("rollout_data/0.pt", {
        "group_index": 0, "index": 0, "rollout_id": None, "prompt": ASKED, "tokens": [*IDS, 16, 2, 5, 19],
        "response": "", "response_length": 4, "label": "2", "reward": 1.0, "loss_mask": [1, 1, 0, 1],
        "weight_versions": ["1"], "status": "completed", "multimodal_inputs": None, "metadata": {},
    }),
    "tsae": ("generations/generation-000001-rank-0.parquet", {
        "step": 1, "generation": 1, "rank": 0, "micro_batch": [0, 0], "messages": json.dumps(USER), "prompt_ids": IDS,
        "response_ids": [16, 2, 19], "response_mask": [1, 1, 0], "reward/right": 1.0, "reward": 1.0, "advantage": 0.5,
        "truncated": False, "old_logprobs": [-0.5, -1.0, -1.5], "sampler_logprobs": [-0.5, -1.0, -1.5],
        "data/answer": "2", "data/problem_id": "p",
    }),
    "lm-eval": ("samples_sums.jsonl", {
        "doc_id": 0, "doc": {}, "target": "2", "arguments": {"gen_args_0": {"arg_0": "1+1?"}}, "resps": [["#2"]],
        "filtered_resps": ["2"], "filter": "none", "metrics": ["exact_match"], "exact_match": 1.0,
    }),
}  # fmt: skip
"""A row of the logs of others as their functions write it, and the name of its file."""
_APART = {"inspect", "plain"}
"""Inspect's logs are read by its own library; plain ones are drawn above."""


def test_every_importer_is_drawn() -> None:
    shipped = {config.get("format", name) for name, (_, config) in SHIPPED.items()}
    assert {name for known in KNOWN for name in known.formats} == shipped | {*WRITTEN} | _APART


def rows_of(trainer: str) -> list[dict[str, Any]]:
    if trainer in WRITTEN:
        return [WRITTEN[trainer][1]]
    file = LOGS / trainer / SHIPPED[trainer][0]
    if file.suffix == ".parquet":
        return list(pq.read_table(file).to_pylist())
    text = file.read_text(encoding="utf-8")
    return [json.loads(line) for line in ([text] if file.suffix == ".json" else text.splitlines())]


def write_rows(file: Path, rows: list[dict[str, Any]]) -> bool:
    """Write a log; whether it can be written: Parquet wants values of one type in a column."""
    file.parent.mkdir(parents=True)
    try:
        if file.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), file)
        elif file.suffix == ".pt":
            torch.save({"rollout_id": 0, "samples": rows}, file)
        else:
            ends = "" if file.suffix == ".json" else os.linesep
            file.write_text("".join(json.dumps(row) + ends for row in rows), encoding="utf-8")
    except (pa.ArrowException, OverflowError, UnicodeError):
        return False
    return True


def leaves(value: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [path for key, item in inside for path in leaves(item, (*before, key))]
    return found or [before]


@pytest.mark.slow(ci=True)
@pytest.mark.parametrize("trainer", [*SHIPPED, *WRITTEN])
@pytest.mark.parametrize("amount", AMOUNTS)
def test_logs_of_trainers_are_read_in_order_or_refused(trainer: str, amount: int, chat: Checkpoint) -> None:
    """Rows of the real log in any number and order, some of whose values are others."""
    name, config = SHIPPED.get(trainer) or (WRITTEN[trainer][0], {})
    lines = [json.dumps(row) for row in rows_of(trainer)]
    most = 1 if name.endswith(".json") else 5
    told = {"format": trainer, **config}

    def check(data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(lines), min_size=1, max_size=most))
        rows = [json.loads(line) for line in chosen]
        for _ in range(data.draw(st.integers(0, 2))):
            inside: Any = data.draw(st.sampled_from(rows))
            *path, last = data.draw(st.sampled_from(leaves(inside)))
            for key in path:
                inside = inside[key]
            inside[last] = data.draw(json_values | st.sampled_from([inside[last]]))
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder, trainer)
            if write_rows(log / name, rows):
                imported(log, chat, Path(folder, "found.parquet"), **told)

    with tempfile.TemporaryDirectory() as folder:  # what is whole is read
        write_rows(Path(folder, trainer, name), rows_of(trainer)[:most])
        assert imported(Path(folder, trainer), chat, Path(folder, "found.parquet"), **told)
    examples(check, amount, data=st.data())
