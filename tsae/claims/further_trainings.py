"""Claims that compare trainings (h, i, l, m, r to u, w to z): what a single run lacks for each, and how to add it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tsae.claims.evidence import Evidence
from tsae.claims.judging import Judgement, untestable
from tsae.claims.literature import CLAIMS

_TWO = "; then sample both (`tsae rollouts sample`) and compare"

_LACKS = {
    "h": (
        "a second training of the same base, on backward reformulations of its hard problems",
        f"`tsae reformulate PROBLEMS --to backward.jsonl`, and the same trainer on that file{_TWO}",
    ),
    "i": (
        "a second training, whose credit for single tokens comes from features",
        f"`tsae credit fit`, and FeatureGRPOTrainer of tsae.rl.trl in place of GRPOTrainer{_TWO}",
    ),
    "l": (
        "two more trainings: on the 20 % of tokens with the highest entropy, and on the others",
        f"GRPOConfig(top_entropy_quantile=0.2) of TRL for the first, and a loss mask for the other{_TWO}",
    ),
    "m": (
        "trainings with random rewards, from a base with a better format latent and from one without",
        f"a reward function that draws 0 or 1 at random in place of the verifier{_TWO}",
    ),
    "r": (
        "copies of the last checkpoint whose lower, or upper, half of the blocks has the base's weights, and what they "
        "answer",
        "two folders with these tensors exchanged, and `tsae rollouts sample` on both (`tsae drift` says only how far "
        "each layer moved)",
    ),
    "s": (
        "entropies of planning and of execution tokens along the steps of a run, which a log does not keep",
        "`tsae capture --plan own --token-statistics` of several checkpoints, and an annotator that tells these tokens "
        "apart",
    ),
    "t": (
        "a second task, on which the base and the last checkpoint are trained further, with a KL anchor and without",
        f"the same trainer on other problems, with GRPOConfig(beta=0.04) of TRL for the anchor{_TWO}",
    ),
    "u": (
        "a second training, whose reward is the similarity of each step to an expert's, on problems that no response "
        "solves",
        f"a reward function that compares steps with worked solutions{_TWO}",
    ),
    "w": (
        "a stronger teacher’s refinements of this model’s responses, and two trainings: on those within its reach, and "
        "on those beyond it",
        f"refinements sorted by their likelihood under the base, and the same trainer on either half{_TWO}",
    ),
    "x": (
        "to know which problems the base saw in pretraining, and fresh problems of the same kind",
        "problems made after the base’s training data ended, and `tsae rollouts sample` of base and checkpoint on both",
    ),
    "y": (
        "a second training, on problems without the cue that goes along with the answer, and a test set where it "
        "misleads",
        f"the same trainer on problems with the cue removed or balanced{_TWO} on that test set",
    ),
    "z": (
        "responses of the base whose next-token probabilities a smaller pair, tuned and untuned, shifts, and questions "
        "of knowledge",
        "such responses imported as a policy of their own (`tsae rollouts import`), beside those of the checkpoint",
    ),
}


def _lacking(key: str, run: Evidence) -> Judgement:
    return untestable(CLAIMS[key], *_LACKS[key])


FURTHER: dict[str, Callable[[Evidence], Judgement]] = {key: partial(_lacking, key) for key in _LACKS}
