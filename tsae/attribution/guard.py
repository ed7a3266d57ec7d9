"""Attribution while training: a recorder of what every sample moves, and a guard that keeps a target within a bound.

    recorder = Recorder(TrainedWeights(model), optimiser, targets)
    guard = Guard(recorder, "direct (hard)", harmful="rises", bound=0.55)
    for step in …:
        for micro_batch in …:
            with recorder.samples(facts):       # one mapping a sample
                loss(model, micro_batch).backward()
        listed = guard()                        # before gradients are clipped
        optimiser.step()                        # calls the recorder

**The recorder** keeps two numbers for every sample and target, with the sign of what the sample did to the target:

    now     −lr c k₀ ∘ ∇F · g_i        its part in the step that trained on it
    share   now · (1 + …)              and in the steps after, to which momentum carries it

∇F is the target's gradient, k₀ the optimiser's own factor with its √v̂ of this step, c what gradient clipping did.
These are the summands of `tsae.attribution.shares.shares`. Without momentum and with `refresh=1` both numbers
are exactly those. With `refresh=m` the target's gradient is up to m steps old. With momentum, a sample acts for about 1
/ (1 − β₁) steps more; the target's gradient, √v̂, the learning rate and clipping of those steps are not known yet, and
`share` takes them as they are now. Shares of the first steps suffer most, because there √v̂ grows fast; attribution
after the run has them right.

**The guard** judges a step before it is taken. If where the target is heading and what the step's samples add stay
within the bound, nothing is listed. Else the samples with the largest harmful effects are listed, as few as bring it
back to the bound, and their gradients are multiplied by `weight`. Single samples' effects are large and opposed, and
nearly cancel. So their sum is judged, and no sample is touched for its own effect while the sum is harmless. The
prediction is linear in the gradients of one step: it does not know that the policy will sample other responses
afterwards. The target's value is measured again at every refresh, so errors do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from tsae.attribution.sample_gradients import BatchGradients, TrainedWeights
from tsae.attribution.targets import Targets
from tsae.base.usual_state import usual_state
from tsae.checkpoints.hooks import hooked
from tsae.checkpoints.loading import rotate_rows_alone
from tsae.errors import TsaeError, refuse


class Guard:
    """Watches one target of a recorder.

    Args:
        recorder: of the run.
        target: name of the target.
        harmful: the direction that does harm.
        bound: value that the target shall not pass, in its units.
        weight: of listed samples, from 0 (left out) to 1 (listed only).

    Raises:
        TsaeError: for an unknown target, or a weight out of range.
    """

    def __init__(
        self, recorder: Recorder, target: str, *, harmful: Literal["rises", "falls"], bound: float, weight: float = 0.0
    ) -> None:
        names = recorder.targets.names
        what = f"harmful={harmful!r} must be rises or falls, bound={bound} finite, and weight={weight} from 0 to 1"
        odd = harmful not in ("rises", "falls") or not isfinite(bound) or not 0 <= weight <= 1
        known = f"The recorder has {', '.join(names)}."
        refuse("Guard", (target not in names, f"no target {target!r}", known), (odd, what, None))
        self.recorder, self.column, self.bound, self.weight = recorder, names.index(target), bound, weight
        self.sign = 1.0 if harmful == "rises" else -1.0
        self._listed: list[pd.DataFrame] = []

    def __call__(self) -> pd.DataFrame:
        """Judge the step that is going on; call it after its last backward pass and before gradients are clipped.

        Returns:
            the samples that it lists, worst first: step, place (in the order of the step's micro-batches), effect (in
            units of the target), and their facts.
        """
        effect = self.recorder.predicted()[:, self.column]
        excess = self.sign * (self.recorder.heading[self.column] + effect.sum() - self.bound)
        listed = worst(self.sign * effect, excess)
        if len(listed) and self.weight < 1:
            weights = np.ones(len(effect))
            weights[listed] = self.weight
            self.recorder.down_weight(weights)
        step, facts = self.recorder.step + 1, self.recorder.facts
        self._listed.append(
            pd.DataFrame([{"step": step, "place": int(i), "effect": effect[i], **facts[i]} for i in listed])
        )
        return self._listed[-1]

    @property
    def listed(self) -> pd.DataFrame:
        """All samples that were listed so far."""
        some = [frame for frame in self._listed if len(frame)]
        return pd.concat(some, ignore_index=True) if some else pd.DataFrame(columns=["step", "place", "effect"])


def worst(harm: np.ndarray, excess: float) -> np.ndarray:
    """Indices of the fewest samples whose harm, (n,), adds up to the excess, worst first; all harmful ones if that is
    not enough."""
    if excess <= 0:
        return np.zeros(0, dtype=int)
    order = np.argsort(-harm, kind="stable")
    order = order[harm[order] > 0]
    enough = int(np.searchsorted(np.cumsum(harm[order]), excess)) + 1
    return order[:enough]


class Recorder:
    """Records what the samples of every step do to targets.

    Args:
        trained: the model and the weights that are followed; those that the optimiser trains.
        optimiser: torch's Adam, AdamW or SGD, or what wraps one.
        targets: what is followed.
        refresh: steps between two gradients of the targets.
        n_steps: of the whole training; momentum carries nothing beyond. None: no end is known.
        dtype: of what a step holds of its samples until its end. bfloat16 takes half the memory, and with
            several targets less time on a processor that multiplies it; errors are some thousandths of a sample's
            numbers.

    Raises:
        TsaeError: for another optimiser, or one that does not train these weights.
    """

    def __init__(
        self,
        trained: TrainedWeights,
        optimiser: torch.optim.Optimizer,
        targets: Targets,
        *,
        refresh: int = 5,
        n_steps: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.trained, self.targets, self.refresh, self.n_steps = trained, targets, refresh, n_steps
        self.optimiser = _plain(optimiser)
        groups = {id(p): group for group in self.optimiser.param_groups for p in group["params"]}
        missing = next((name for name, p in trained.parameters.items() if id(p) not in groups), None)
        fix = "Give TrainedWeights the names of the weights that it trains."
        refuse(
            "Recorder",
            (refresh < 1, f"refresh={refresh} is less than 1", None),
            (missing is not None, f"the optimiser does not train {missing!r}", fix),
        )
        self._groups = {name: groups[id(p)] for name, p in trained.parameters.items()}
        self.step = 0
        """Steps finished."""
        self.batch = BatchGradients(trained, dtype=dtype, n_directions=len(targets.names))
        """Of the step that is going on."""
        self.facts: list[dict[str, Any]] = []
        """Of the samples of the step that is going on, without token ids."""
        self._weights = torch.ones(0, dtype=torch.float32)
        self._norm = self._clipped = 0.0
        self._frames: list[pd.DataFrame] = []
        self.values: dict[int, np.ndarray] = {}
        """(n_targets,) by steps finished, when gradients were taken."""
        self._arriving = np.zeros(len(targets.names))
        self._moved = np.zeros(len(targets.names))
        self._slopes = self._look()
        self._hooks = [
            self.optimiser.register_step_pre_hook(lambda *_: self._before()),
            self.optimiser.register_step_post_hook(lambda *_: self._after()),
        ]

    def close(self) -> None:
        """Leave the optimiser alone."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def samples(self, facts: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Around the forward and the backward pass of a micro-batch.

        Args:
            facts: of each sample, in the order of the batch: what shall stand beside its numbers, such as problem_id,
                reward, advantage.
        """
        if taken := {"step", "weight"} & {name for fact in facts for name in fact}:
            what = f"a sample has the fact {min(taken)!r}, which the recorder writes itself"
            raise TsaeError(what, where="Recorder.samples", fix="Give it another name.")
        with self.batch.micro_batch(len(facts)):
            yield
        self.facts += [{k: v for k, v in of.items() if not isinstance(v, list | np.ndarray)} for of in facts]
        self._weights = torch.cat([self._weights, torch.ones(len(facts), dtype=torch.float32)])
        self._norm = self._gradient_norm()

    @property
    def heading(self) -> np.ndarray:
        """(n_targets,) where the targets are heading: their last values, what was recorded since then, and what
        momentum will still carry."""
        return np.asarray(self.values[max(self.values)] + self._moved + self._arriving)

    @torch.no_grad()
    def predicted(self) -> np.ndarray:
        """(n, n_targets) shares of the samples of this step, before it is taken.

        As recorded later, but for gradients that are clipped after this call.
        """
        scale = self.trained.join({name: self._scale(name, ahead=True) for name in self._groups})
        products = self.batch.products(self._slopes.to(scale.device) * scale)
        return np.asarray(-products.cpu().numpy() * self._carried(self.step + 1) * self._weights.numpy()[:, None])

    @torch.no_grad()
    def down_weight(self, weights: np.ndarray) -> None:
        """Multiply the samples of this step, (n,): as if their advantages had been multiplied.

        Call it after the last backward pass and before gradients are clipped. It changes the gradients in place.
        """
        factor = torch.as_tensor(weights, dtype=torch.float32)
        away = self.batch.weighted_sum((self._weights * (1 - factor)).to(self.trained.device))
        for name, gradient in away.items():
            own = self.trained.parameters[name].grad
            if own is not None:
                own -= gradient.view_as(own).to(own.dtype)
        self._weights = self._weights * factor
        self._norm = self._gradient_norm()

    @property
    def frame(self) -> pd.DataFrame:
        """One row a sample: step, its facts without token ids, weight (by `down_weight`), and
        `now: …` and `share: …` of every target, in its units."""
        return pd.concat(self._frames, ignore_index=True) if self._frames else pd.DataFrame()

    # --- around the optimiser's step

    def _before(self) -> None:
        self._clipped = self._gradient_norm()

    @usual_state()
    @torch.no_grad()
    def _after(self) -> None:
        self.step += 1
        middle = self._slopes
        if self.step % self.refresh == 0:
            self._slopes = self._look()
            middle = (middle + self._slopes) / 2
        scale = self.trained.join({name: self._scale(name, ahead=False) for name in self._groups})
        clip = self._clipped / self._norm if self._norm else 1.0
        products = self.batch.products(middle.to(scale.device) * scale)
        now = -clip * products.cpu().numpy() * self._weights.numpy()[:, None]
        carried = self._carried(self.step)
        self._tally(now.sum(0), carried)
        frame = pd.DataFrame(self.facts)
        frame.insert(0, "step", self.step)
        frame["weight"] = self._weights.numpy()
        for j, name in enumerate(self.targets.names):
            frame[f"now: {name}"] = now[:, j]
            frame[f"share: {name}"] = now[:, j] * carried
        self._frames.append(frame)
        self.batch.clear()
        self.facts, self._weights = [], torch.ones(0)

    def _tally(self, now: np.ndarray, carried: float) -> None:
        """Follow where the targets are heading: what arrives by momentum decays from step to step."""
        arrived = self._arriving * (1 - self._momentum())
        self._arriving = self._arriving - arrived + now * (carried - 1)
        self._moved = np.zeros_like(now) if self.step in self.values else self._moved + arrived + now

    @usual_state()
    def _look(self) -> torch.Tensor:
        """(n_targets, P) present gradients of the targets; leaves the model as it was."""
        model = self.trained.model
        training, needed = model.training, {p: p.requires_grad for p in model.parameters()}
        model.eval()
        try:
            with hooked(*rotate_rows_alone(model)):
                self.values[self.step] = self.targets.values(self.trained)
                return self.targets.gradients(self.trained).float()
        finally:
            model.train(training)
            for parameter, was in needed.items():
                parameter.requires_grad_(was)

    def _gradient_norm(self) -> float:
        grads = [p.grad for p in self.trained.parameters.values() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0

    def _scale(self, name: str, *, ahead: bool) -> torch.Tensor:
        """lr k₀ of a weight, in its shape: of the last step, or of the one that the present gradient will make."""
        parameter, group = self.trained.parameters[name], self._groups[name]
        if parameter.grad is None:
            return torch.zeros_like(parameter)
        rate, state = float(group["lr"]), self.optimiser.state.get(parameter, {})
        if "betas" not in group:
            return torch.full_like(parameter, rate)
        (beta, beta2), t = group["betas"], int(state.get("step", 0)) + ahead
        second = state.get("exp_avg_sq", torch.zeros_like(parameter))
        if ahead:
            second = (beta2 * second).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        root = (second / (1 - beta2**t)).sqrt_().add_(group["eps"])
        return rate * (1 - beta) / (1 - beta**t) / root

    def _momentum(self) -> float:
        group = self.optimiser.param_groups[0]
        return float(group["betas"][0] if "betas" in group else group["momentum"])

    def _carried(self, t: int) -> float:
        """What a gradient of step t does in all steps, by what it does in step t, if these are alike."""
        keeps = self._momentum()
        if not keeps:
            return 1.0
        adam = "betas" in self.optimiser.param_groups[0]
        left = int(np.ceil(np.log(1e-6) / np.log(keeps)))
        d = np.arange(left if self.n_steps is None else max(1, min(left, self.n_steps - t + 1)))
        corrections = (1 - keeps**t) / (1 - keeps ** (t + d)) if adam else 1.0
        return float(np.sum(keeps**d * corrections))


def _plain(optimiser: Any) -> torch.optim.Optimizer:
    """Torch's own, out of accelerate's wrapper."""
    inner: Any = getattr(optimiser, "optimizer", optimiser)
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
    odd = [name for name in ("amsgrad", "maximize", "nesterov", "dampening") if inner.defaults.get(name)]
    what = f"the optimiser is {type(inner).__name__}{''.join(f' with {name}' for name in odd)}"
    momenta = {str(group.get("betas", group.get("momentum"))) for group in inner.param_groups}
    refuse(
        "Recorder",
        (
            type(inner) not in known or odd,
            f"{what}, expected torch's Adam, AdamW or SGD",
            "Train with one of these, or attribute after the run.",
        ),
        (len(momenta) > 1, "groups of weights have different momentum", "Give all the same."),
    )
    found: torch.optim.Optimizer = inner
    return found
