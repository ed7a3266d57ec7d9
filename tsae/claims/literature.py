"""The claims, and where each was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """One thing that the literature says."""

    key: str
    """A letter."""
    title: str
    """A few words."""
    sentence: str
    """The claim."""
    source: str
    """An arXiv id, or how it is known."""


STUDIED = "abcdefghijklmnopqrstuv"
"""Letters of the claims that docs/claims.md tests on the testbed."""

CLAIMS: dict[str, Claim] = {
    claim.key: claim
    for claim in (
        Claim("a", "Inverted U", "Medium problems give the most; easy and hard ones give less.", "2605.28388"),
        Claim("b", "Hard harms", "Problems that are too hard damage what the model could do before.", "2605.28388"),
        Claim(
            "c",
            "Lone successes",
            "Normalising by group makes a lone success the group's exemplar. It is a shortcut more often than other "
            "successes. Without lone successes, or without dividing by the deviation, there is less damage.",
            "2605.28388",
        ),
        Claim(
            "d",
            "Behaviour first",
            "Answers repeat, computation is skipped and responses get shorter before accuracy falls.",
            "2605.28388",
        ),
        Claim(
            "e",
            "Easy: direct answers",
            "Easy problems strengthen features of direct answers and basic computation, and weaken deliberation.",
            "2605.28388",
        ),
        Claim(
            "f",
            "Hard: rare reasoning",
            "Hard problems activate reasoning features that help only on the rare successful trajectory.",
            "2605.28388",
        ),
        Claim(
            "g",
            "Medium: both",
            "Medium problems strengthen features of computation and of multi-step reasoning.",
            "2605.28388",
        ),
        Claim("h", "Backward reformulation", "Backward reformulations make hard problems teach.", "2605.28388"),
        Claim("i", "Credit from features", "Credit on tokens, guided by T-SAE features, helps.", "2605.28388"),
        Claim(
            "j",
            "One format wins",
            "One format wins within the first epoch and the others collapse. Performance does not decide which.",
            "2504.07912",
        ),
        Claim(
            "k",
            "Difficulty drifts",
            "Which problems are productive changes within steps, so static labels go stale. An adaptive curriculum "
            "beats a static one at equal samples.",
            "2504.05520",
        ),
        Claim(
            "l",
            "Choice points",
            "Training on the 20 % of tokens with the highest entropy equals training on all; on the rest it loses.",
            "2506.01939",
        ),
        Claim(
            "m",
            "Spurious rewards",
            "Random rewards raise accuracy if the base has a better format latent, and not if it has none.",
            "2506.10947",
        ),
        Claim("n", "Base overtakes", "At pass@k for large k, the base overtakes the trained model.", "2504.13837"),
        Claim("o", "Sparser when hard", "Hidden states get sparser as problems get harder.", "2603.03415"),
        Claim(
            "p",
            "Coherent, not valid",
            "Steps become coherent with each other, without the solution becoming valid.",
            "2510.18176",
        ),
        Claim("q", "Errors breed errors", "Errors in its own context make a model err more.", "2509.09677"),
        Claim(
            "r", "Lower layers", "The damage sits in lower layers more than in upper ones.", "reported without a paper"
        ),
        Claim(
            "s",
            "Two phases",
            "Execution is learned first, planning later: the entropy of planning tokens rises while that of execution "
            "settles.",
            "2509.03646",
        ),
        Claim(
            "t",
            "Distance and plasticity",
            "The farther from its base (KL), the slower a model learns a second task. A KL anchor keeps it able to.",
            "reported without a paper; see 2509.04259",
        ),
        Claim(
            "u",
            "Expert similarity",
            "A reward for each step's similarity to an expert's makes problems teach that no response solves.",
            "2510.25992",
        ),
        Claim(
            "v",
            "Pruning easy samples",
            "Leaving out easy samples helps with much data and harms with little.",
            "2206.14486",
        ),
        Claim(
            "w",
            "Refined beyond reach",
            "Responses that a stronger teacher refined beyond what the student can learn make the student worse.",
            "2402.10110",
        ),
        Claim(
            "x",
            "Contaminated benchmarks",
            "Gains on a benchmark that the base saw in pretraining are recall, and vanish on a clean one.",
            "2507.10532",
        ),
        Claim(
            "y",
            "Spurious cues removed",
            "Where what goes along with the right answer by chance is removed, training generalises better.",
            "2605.27676",
        ),
        Claim(
            "z",
            "Tuned while decoding",
            "Shifting the next-token probabilities while decoding, with the weights as they are, spares knowledge that "
            "training loses.",
            "2401.08565",
        ),
    )
}
