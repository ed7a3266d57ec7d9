"""Small things that many tests are made of: random-weight models, rollouts with known ids, feature tables."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

# Scripts and tests share their planted worlds, and these their tables.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from statements.tables import BOS, EOS
from statements.tables import feature_table as feature_table
from statements.tables import write_store as write_store

SHARED = Path(__file__).resolve().parents[2].parent / "shared"
PAD = 18
N_LAYERS, D_MODEL, VOCABULARY = 3, 16, 20
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "gpt2")
MIXTURES = ("qwen3_moe", "mixtral", "gpt_oss", "olmo3", "qwen3_next", "llama4", "deepseek_v3")
"""Mixtures of experts, and layers of several kinds."""
BATCHED = ("phi3", "phimoe", "dynamic", "mamba2", "falcon_h1", "recurrent_gemma", "rwkv", "minimax")
"""Models for which the longest text of a batch, or the padding of the others, could matter."""


def model_config(architecture: str, d_model: int = D_MODEL, **changed: Any) -> Any:
    """A configuration of three layers over the testbed's 20 tokens; gpt2's may have other values."""
    import transformers as hf

    ids = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}
    bare = {"vocab_size": VOCABULARY, "hidden_size": d_model, "num_hidden_layers": N_LAYERS, **ids}
    common: dict[str, Any] = {
        **bare, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    local = {"num_local_experts": 4, "num_experts_per_tok": 2}
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
    longrope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.01, 1.02, 1.03],
        "long_factor": [1.03, 1.23, 9.09, 64.8], "original_max_position_embeddings": 16,
    }  # fmt: skip
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    mamba = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 8}
    made: dict[str, tuple[Any, dict[str, Any]]] = {
        "llama": (hf.LlamaConfig, {}),
        "qwen2": (hf.Qwen2Config, {}),
        "qwen3": (hf.Qwen3Config, {"head_dim": 8}),
        # One layer of full attention, the others with a window shorter than the texts.
        "gemma3": (hf.Gemma3TextConfig, {
            "head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8, "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        }),
        "qwen3_moe": (hf.Qwen3MoeConfig, {"head_dim": 8, **experts}),
        "mixtral": (hf.MixtralConfig, local),
        "gpt_oss": (hf.GptOssConfig, {"head_dim": 8, "sliding_window": 5, **local}),
        "llama4": (hf.Llama4TextConfig, {  # a router in the second block alone
            "intermediate_size": 16, "intermediate_size_mlp": 32, "head_dim": 8, **local, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "no_rope_layer_interval": 2, "attention_chunk_size": 6,
        }),
        "deepseek_v3": (hf.DeepseekV3Config, {
            **heads, "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        }),
        "olmo3": (hf.Olmo3Config, {"sliding_window": 5}),
        "qwen3_next": (hf.Qwen3NextConfig, {
            "head_dim": 8, "layer_types": kinds, "linear_num_value_heads": 2, "shared_expert_intermediate_size": 16,
            **linear, **experts,
        }),
        "phi3": (hf.Phi3Config, {"rope_parameters": longrope, "original_max_position_embeddings": 16}),
        "phimoe": (hf.PhimoeConfig, {
            "num_local_experts": 4, "rope_parameters": longrope | {"short_mscale": 1.0, "long_mscale": 1.3},
        }),
        "dynamic": (hf.LlamaConfig, {"rope_parameters": dynamic, "max_position_embeddings": 16}),
        "falcon_h1": (hf.FalconH1Config, {**mamba, "mamba_n_groups": 1}),
        "recurrent_gemma": (hf.RecurrentGemmaConfig, {"attention_window_size": 5, "lru_width": 16}),
        "minimax": (hf.MiniMaxConfig, {"head_dim": 8, **local, "block_size": 8, "layer_types": kinds}),
    }  # fmt: skip
    if architecture in made:
        kind, own = made[architecture]
        return kind(**common | own)
    if architecture == "mamba2":
        return hf.Mamba2Config(state_size=4, num_heads=4, head_dim=8, n_groups=1, chunk_size=8, **bare)
    if architecture == "rwkv":
        return hf.RwkvConfig(attention_hidden_size=16, **bare)
    assert architecture == "gpt2"
    sizes = {"vocab_size": VOCABULARY, "n_positions": 128, **changed}
    return hf.GPT2Config(n_embd=d_model, n_layer=N_LAYERS, n_head=2, n_inner=32, **ids, **sizes)


def save_model(folder: Path, architecture: str = "llama", *, seed: int = 0, d_model: int = D_MODEL) -> Path:
    """A model of random weights, large enough for attention and norms to matter, with the testbed's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from tsae.testbed import make_tokenizer

    with torch.random.fork_rng():  # What the configuration draws must not differ from run to run.
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(model_config(architecture, d_model))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim > 1 else 0.1
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_perturbed(source: Path, folder: Path, *, amount: float = 0.05, seed: int = 1) -> Path:
    """A copy whose weights moved a little, as a short training run would move them."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    moved = {name: w + amount * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def flip_middle(file: Path) -> None:
    """Change one byte in the middle of a file of more than 2 MiB."""
    content = bytearray(file.read_bytes())
    assert len(content) > 2 << 20
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {file.relative_to(folder).as_posix(): digest_without_command(file.read_bytes()) for file in files}


def digest_without_command(content: bytes) -> str:
    """The SHA-256 of a file, where it is JSON without the command that wrote it: that names folders."""
    if content.startswith(b"{"):
        with contextlib.suppress(ValueError):
            told = json.loads(content)
            content = json.dumps(
                {key: told[key] for key in told if key not in ("command", "from", "checksum")}
            ).encode()
    return hashlib.sha256(content).hexdigest()


def save_series(folder: Path, records: list[dict[str, Any]], name: str = "tiny") -> Path:
    (folder / "series.json").write_text(json.dumps({"name": name, "checkpoints": records}), encoding="utf-8")
    return folder


def save_base_and_run(folder: Path, model: Path) -> Path:
    """A series of a model and one run of it, whose checkpoint differs a little."""
    save_perturbed(model, folder / "base", amount=0.0)
    save_perturbed(model, folder / "run-1")
    records = [{"id": "base", "path": "base"}, {"id": "run-1", "path": "run-1", "run": "run", "step": 1}]
    return save_series(folder, records)


def random_sae(d_model: int = D_MODEL, *, site: str, around: float = 0.0, threshold: float = 0.0, **config: Any) -> Any:
    """Random directions around a random centre; 24 latents, which are active beyond a threshold."""
    import torch

    from tsae import SAEConfig, TemporalSAE

    sae = TemporalSAE(d_model, SAEConfig(**{"d_sae": 24, "k": 4, **config}), site=site)
    generator = torch.Generator().manual_seed(0)
    sae.initialize(around * torch.randn(d_model, generator=generator) if around else torch.zeros(d_model), generator)
    sae.threshold.fill_(threshold)
    return sae.eval().requires_grad_(False)


def response_means(model: Any, sae: Any, rollouts: Any, special: list[int]) -> np.ndarray:
    """(n_trajectories, d_sae) mean codes of responses, by the reader that capture uses, without padding."""
    import torch

    from tsae.checkpoints.hooks import HuggingFaceReader

    found, reader = [], HuggingFaceReader(model, [sae.site])
    for row in range(len(rollouts)):
        prompt, response = rollouts.tokens(row)
        ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))[None]
        codes = sae.encode(reader.read(ids, torch.ones_like(ids))[sae.site][0].to(sae.W_dec.dtype))[len(prompt) :]
        counted = codes[torch.from_numpy(~np.isin(response, special))]
        found.append(counted.sum(0).numpy() / max(1, len(counted)))
    return np.array(found)


def make_rollouts(
    policies: tuple[str, ...] = ("base",),
    *,
    n_problems: int = 12,
    n_samples: int = 3,
    seed: int = 0,
    vocabulary: int = 17,
    tokenizer: str | None = None,
    **columns: Any,
) -> Any:
    """Random trajectories of different lengths: <bos> and digits as prompt, random tokens and <eos> as response."""
    from tsae import Rollouts

    rng = np.random.default_rng(seed)
    prompts = [[BOS, *rng.integers(0, vocabulary, rng.integers(2, 7)).tolist()] for _ in range(n_problems)]
    records = []
    for policy in policies:
        for problem, prompt in enumerate(prompts):
            for _ in range(n_samples):
                right = bool(rng.random() < 0.5)
                response = [*rng.integers(0, vocabulary, rng.integers(1, 12)).tolist(), EOS]
                records.append({
                    "problem_id": f"p{problem:03d}", "policy": policy, "prompt": f"prompt {problem}",
                    "response": "text", "prompt_ids": prompt, "response_ids": response, "reward": float(right),
                    "outcome": "success" if right else "failure", "finish_reason": "stop", **columns,
                })  # fmt: skip
    info = {} if tokenizer is None else {"tokenizer": tokenizer}
    return Rollouts.from_records(records, info)


def graded(by_policy: dict[str, dict[str, tuple[int, ...] | str]], **columns: Any) -> Any:
    """Rollouts of every policy and problem: (successes, failures, unknown), or a letter each, such as "sfu"."""
    from tsae import Rollouts

    names = {"s": "success", "f": "failure", "u": "unknown"}
    records = [
        {"problem_id": id, "policy": policy, "prompt_ids": [1], "response_ids": [2], "outcome": names[letter],
         "reward": None if letter == "u" else float(letter == "s"), **columns}
        for policy, problems in by_policy.items()
        for id, given in problems.items()
        for letter in (given if isinstance(given, str) else "".join(map(str.__mul__, "sfu", given)))
    ]  # fmt: skip
    return Rollouts.from_records(records)


def synthetic_store(
    folder: Path,
    texts: list[np.ndarray],
    *,
    site: str = "x.site",
    special: tuple = (BOS, EOS),
    dtype: str = "float32",
) -> Any:
    """A store of one reader whose activations are given: one (n_tokens, d_model) array a trajectory and problem.

    The first token of a trajectory is its prompt, the others are its response; none of them is special.
    """
    from tsae import Rollouts

    records = [
        {"problem_id": f"p{i:04d}", "policy": "base", "outcome": "unknown"}
        | {"prompt_ids": [0], "response_ids": [1 + (t % 9) for t in range(len(text) - 1)]}
        for i, text in enumerate(texts)
    ]
    rollouts = Rollouts.from_records(records)
    ids = np.concatenate([np.concatenate(rollouts.tokens(row)) for row in range(len(texts))])
    shard = (np.concatenate(texts), ids, [len(text) for text in texts], np.arange(len(texts)))
    return write_store(folder, rollouts, {"base": (None, [shard])}, site=site, special=special, dtype=dtype)


def overwrite(store: Any, shard: Any, site: str, values: Any) -> None:
    """Other float32 activations in a shard of a store, their norms, and the checksum of both."""
    from tsae.base.artefact import file_hash, write_record

    values = np.broadcast_to(np.asarray(values, np.float32), shard.raw(site).shape)
    for raw, new in ((shard.raw(site), values), (shard.norms(site), np.linalg.norm(values, axis=1))):
        writable = np.memmap(shard.path, mode="r+", dtype=raw.dtype, offset=raw.offset, shape=raw.shape)
        writable[:] = new
        writable.flush()
    file = str(shard.path.relative_to(store.path.resolve()))
    for record in [record for reader in store.manifest["readers"] for record in reader["shards"]]:
        if record["file"] == file:
            record["hash"] = file_hash(shard.path)
    write_record(store.path / "manifest.json", store.manifest)
