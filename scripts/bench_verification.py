"""What checksums cost: their share of the CPU time of capture, training, encoding, diff and report.

    python scripts/bench_verification.py --to runs/verification

Samples the shipped arithmetic checkpoints, and runs every stage on them. Every stage reads what it reads for the first
time, as a process of its own does. Encoding is measured a second time at the width of a small language model, on random
activations. Measured is the CPU time of all threads, in the functions that compute checksums and
in the whole stage.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_scale import Bench, make_sae, make_store

import tsae
from tsae.activations import shard as writer
from tsae.base import files, seal
from tsae.base.disk import sealed_parquet
from tsae.config import DemoConfig
from tsae.demo import demo_rollouts
from tsae.testbed import series as shipped_series

_spent = [0.0]


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **options)
        finally:
            _spent[0] += time.thread_time() - start

    return wrapped


def _measured(name: str, stage: Callable[[], Any], rows: dict[str, Any]) -> Any:
    seal._digest.cache_clear()
    sealed_parquet._state.cache_clear()
    _spent[0], start = 0.0, time.process_time()
    found = stage()
    total = time.process_time() - start
    rows[name] = {"cpu_s": round(total, 3), "checksums_s": round(_spent[0], 4), "share": round(_spent[0] / total, 5)}
    print(f"{name:<11} {total:7.2f} s CPU, of which checksums {_spent[0]:.4f} s = {_spent[0] / total:.2%}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=Path, default=Path("runs/verification"))
    parser.add_argument("--problems", type=int, default=60)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1_500_000, help="of the training; the demo's by default")
    options = parser.parse_args()
    for module, name in ((seal, "sha256"), (writer, "sha256"), (files, "sha256"), (sealed_parquet, "_sha256"),
                         (seal, "_content_digest")):  # fmt: skip
        setattr(module, name, _counted(getattr(module, name)))
    to = options.to
    rows: dict[str, Any] = {}
    config = DemoConfig(to=to, problems=options.problems, samples=options.samples, band_samples=8)
    rollouts = demo_rollouts(config, progress=False)
    series = shipped_series().final()
    _measured("capture", lambda: tsae.capture(series, rollouts, to=to / "acts", progress=False), rows)
    training = tsae.TrainingConfig(tokens=options.tokens, batch_tokens=1024)
    _measured(
        "train",
        lambda: tsae.train(
            tsae.ActivationStore(to / "acts"), tsae.SAEConfig(d_sae=256, k=8), to=to / "sae", training=training,
            progress=False,
        ),
        rows,
    )  # fmt: skip
    _measured("encode", lambda: tsae.encode(to / "sae", to / "acts", to=to / "features", progress=False), rows)
    diff = _measured(
        "diff",
        lambda: tsae.feature_diff(tsae.FeatureTable.load(to / "features"), progress=False),
        rows,
    )
    diff.save(to / "diff")
    _measured(
        "report",
        lambda: tsae.FeatureDiff.load(to / "diff", features=tsae.FeatureTable.load(to / "features")).to_html(
            to / "report.html"
        ),
        rows,
    )
    wide = Bench(problems=32, d_model=576, d_sae=4608)
    make_store(to / "wide" / "acts", wide, wide.samples)
    make_sae(to / "wide" / "sae", to / "wide" / "acts", wide)
    folders = [to / "wide" / name for name in ("sae", "acts", "features")]
    _measured("encode wide", lambda: tsae.encode(folders[0], folders[1], to=folders[2], progress=False), rows)
    size = sum(file.stat().st_size for file in (to / "acts").rglob("*.h5"))
    print(f"store of {size / 1e6:.0f} MB")
    worst = max(row["share"] for row in rows.values())
    print(json.dumps({"name": "verification", "ratio": worst, "store_mb": round(size / 1e6), "stages": rows}))


if __name__ == "__main__":
    main()
