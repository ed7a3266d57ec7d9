"""Twelve popular recipes: the settings that make their loss, in their trainers' words, and the loss that this is here.

Defaults of the trainer at that commit are among the settings where they matter. What comes of each is in
docs/attribution.md, "Recipes".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tsae.attribution.loss import Correction, PolicyLoss

TRL = "huggingface/trl/blob/35def3ee000a87f6839e66f4b7749b06274ed1b3"
"""Release 1.9. In 1.16 the defaults of the loss are the same, but for the ratio that weighs a KL term."""
OPEN_R1 = "huggingface/open-r1/blob/1416fa0cf21595d2083b399a2a0bbddd7f6e9563/recipes"
UNSLOTH = "unslothai/notebooks/blob/3d62ba4a13d17c01f216e3ac16a300dea9706223/python_scripts"
NEMO_RL = "NVIDIA-NeMo/RL/blob/7fa6e55192530ff1346d670ce74f9c70cab8f75b/examples/configs"
OPEN_INSTRUCT = "allenai/open-instruct/blob/d8a7f1ce97087795c19a170691b4de15a7c228a6/scripts/train"
VERL = "volcengine/verl/blob"
PRIME_RL = "PrimeIntellect-ai/prime-rl/blob/9975d8868db6cd83aa22c84a05641ce5b36a80d3/examples/basic"


@dataclass(frozen=True)
class Recipe:
    trainer: str
    """Whose formula it is: trl, verl, nemo_rl, open_instruct, or prime_rl."""
    place: str
    """Of the file on github.com, at a commit."""
    settings: Mapping[str, Any]
    loss: PolicyLoss
    accumulation: int = 1
    per_generation: int = 1


# fmt: off
# open-r1 pins trl 0.18.0, with loss_type bnpo and beta 0.04. No version before 1.10 corrects the KL term by default.
# Unsloth sets beta to 0.001 where it is not given.
BEFORE = {"use_bias_correction_kl": False}
RECIPES = (
    Recipe("trl", f"{TRL}/trl/trainer/grpo_config.py", {}, PolicyLoss(kl_corrected=True)),
    Recipe("trl", f"{TRL}/docs/source/paper_index.md",
           {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4},
           PolicyLoss("grpo", level="sequence", epsilon=3e-4, epsilon_high=4e-4, kl_corrected=True), 1, 4),
    Recipe("trl", f"{OPEN_R1}/DeepSeek-R1-Distill-Qwen-1.5B/grpo/config_demo.yaml",
           {"loss_type": "bnpo", "beta": 0.04, "temperature": 0.7, **BEFORE},
           PolicyLoss("bnpo", temperature=0.7, beta=0.04), 4, 4),
    Recipe("trl", f"{OPEN_R1}/Qwen2.5-1.5B-Instruct/grpo/config_demo_code.yaml",
           {"loss_type": "bnpo", "beta": 0.01, **BEFORE}, PolicyLoss("bnpo", beta=0.01), 4, 4),
    Recipe("trl", f"{OPEN_R1}/Qwen2.5-Coder-7B-Instruct/grpo/config_codeforces.yaml",
           {"loss_type": "dr_grpo", "max_completion_length": 8192, "temperature": 0.7,
            "mask_truncated_completions": True, **BEFORE},
           PolicyLoss("dr_grpo", 8192, 0.7, mask_truncated=True), 4, 4),
    Recipe("trl", f"{UNSLOTH}/Gemma4_(E2B)_GRPO.py",
           {"loss_type": "bnpo", "epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.5, "beta": 0.001,
            "mask_truncated_completions": True, **BEFORE},
           PolicyLoss("bnpo", epsilon=0.2, epsilon_high=0.28, delta=1.5, beta=0.001, mask_truncated=True), 2, 2),
    Recipe("verl", f"{VERL}/a31a8f251faacb38404fa0af7603c00f64a667bb/examples/grpo_trainer/run_qwen3-8b.sh",
           {"use_kl_loss": True, "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"},
           PolicyLoss("bnpo", dual_clip=3.0, beta=0.001, kl_input_clamp=20.0, kl_clamp=10.0)),
    Recipe("verl", f"{VERL}/e2e729f438668f6fcacfd95e1b2912037552f8f7/recipe/dapo/run_dapo_qwen2.5_32b.sh",
           {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 10.0, "loss_agg_mode": "token-mean"},
           PolicyLoss("bnpo", epsilon=0.2, epsilon_high=0.28, dual_clip=10.0)),
    Recipe("verl", f"{VERL}/fd893c788dbdb967c6eb62845b09a02e38819ac1/examples/gspo_trainer/test_gspo_3b_math.sh",
           {"loss_mode": "gspo", "clip_ratio_low": 0.0003, "clip_ratio_high": 0.0004},
           PolicyLoss("grpo", level="sequence", epsilon=0.0003, epsilon_high=0.0004)),
    Recipe("nemo_rl", f"{NEMO_RL}/grpo_math_1B.yaml",
           {"reference_policy_kl_penalty": 0.01},
           PolicyLoss("step", beta=0.01, kl_corrected=True, kl_corrected_to="now", kl_input_clamp=20.0, kl_clamp=10.0)),
    Recipe("open_instruct", f"{OPEN_INSTRUCT}/olmo3/7b_rlzero_math.sh",
           {"beta": 0.0, "kl_estimator": 2},
           PolicyLoss("step", epsilon=0.2, epsilon_high=0.272, correction=Correction("token_truncate", None, 2.0))),
    Recipe("prime_rl", f"{PRIME_RL}/reverse-text/rl.toml", {},
           PolicyLoss("step", surrogate="dppo", ratio_to="sampler", beta=2e-3, kl="k2", kl_to="sampler")),
)
