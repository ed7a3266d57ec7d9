"""Ground truth for every token of a response: what it is for, and whether it is right.

A full response writes one step per operation, ``a op b = r ;``, and then ``# answer <eos>``. A small state machine
parses it from left to right:

1. Step k must copy the result of step k-1 *as written* (the first digit of the problem for k = 0), operator k
   and digit k+1 of the problem; each of these three tokens is right or wrong by itself. A step beyond the
   last operation has nothing to copy: its operands and operator are wrong.
2. Its result is right if it follows from the step's *own* operands and operator. So a slip is marked where it happens,
   and not in later steps that carry it on. A miscopied operand does not make the result wrong.
3. The answer is right if it is the problem's answer, whatever was written before it.
4. Separators, equals signs, answer markers and the end are not judged (None) where the grammar allows them. A token
   that the grammar does not allow is wrong. ``;``, ``#`` and ``<eos>`` keep their role; any other such token is
   "other", and so is the rest of the step, up to its ``;`` or ``#``. Tokens after the first ``<eos>``, and padding at
   the end, are "other" and None.

Every token of any sequence of strings gets a label; only a prompt that is not a chain is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tsae.testbed.chains import OPERATORS, Chain, apply_operator, parse_prompt
from tsae.testbed.tokenizer import BOS, EOS, PAD, split_tokens

_FINAL = re.compile(r"#(\d)\Z")


def given_answer(response_text: str) -> str | None:
    """The digit after the last ``#``, if the response ends with it; None without a final answer.

    Args:
        response_text: the response with or without its special tokens. Text after the first ``<eos>`` is
            ignored.
    """
    text = response_text.partition(EOS)[0].removeprefix(BOS)
    while text.endswith(PAD):
        text = text.removesuffix(PAD)
    match = _FINAL.search(text)
    return match.group(1) if match else None


def verify(response_text: str, answer: str) -> bool:
    """Whether a response ends in ``#`` and the right digit, whatever the way to it.

    A response that was cut off, continues after the answer, or gives none is wrong.
    """
    return given_answer(response_text) == answer.strip()


Role = Literal["operand", "operator", "equals", "result", "separator", "answer_marker", "answer", "end", "other"]
Style = Literal["scratchpad", "direct"]

_STEP_ROLES: tuple[Role, ...] = ("operand", "operator", "operand", "equals", "result", "separator")
_DIGITS = frozenset("0123456789")


@dataclass(frozen=True)
class TokenLabel:
    """What one response token is for."""

    role: Role
    """Its place in the grammar; "other" for tokens that have none."""
    correct: bool | None
    """Right or wrong, by the rules at the top of this module; None where there is nothing to judge."""
    step: int | None
    """The step it belongs to, from 0; None for the answer, the end and padding."""
    style: Style
    """The style of the whole response: "scratchpad" if it writes at least one complete step."""


@dataclass(frozen=True)
class ResponseFacts:
    """What one response did."""

    style: Style
    """Is "scratchpad" with at least one complete step, else "direct", even without an answer."""
    n_steps_required: int
    """Operations of the problem."""
    n_steps_written: int
    """Complete steps ``a op b = r``, whether right or wrong."""
    n_steps_valid: int
    """Steps among them that carry out the operation that was due, with operands and operator copied right. A wrong
    result counts: the computation was written."""
    n_steps_skipped: int
    """Required steps that no valid step carries out."""
    skipped_share: float
    """n_steps_skipped / n_steps_required, 0 to 1: 1 for a direct answer."""
    first_wrong: int | None
    """Index of the first response token with correct=False, None if there is none."""
    skip_index: int | None
    """Index of the first answer marker, if it comes before all required steps: where computation was skipped. A right
    direct answer has a skip_index and no first_wrong."""
    n_tokens: int
    """Response tokens up to and including the first ``<eos>``, without padding."""
    answer: str | None
    """The final answer given, None if there is none."""
    correct: bool
    """Whether the verifier accepts the response."""


def annotate(prompt: str, response: Sequence[str]) -> list[TokenLabel]:
    """Label every token of a response.

    Args:
        prompt: the chain, such as ``3+5*2-7?``.
        response: the token strings of the response, special tokens as ``<eos>`` and ``<pad>``, one per token
            id.

    Returns:
        One label per token.

    Raises:
        TsaeError: where the prompt is not a chain. No response is refused.
    """
    parser = _Parser(parse_prompt(prompt))
    length = _length(response)
    labels = [parser.parse(token) for token in response[:length]]
    style: Style = "scratchpad" if parser.n_complete else "direct"
    labels += [("other", None, None)] * (len(response) - length)
    return [TokenLabel(role, correct, step, style) for role, correct, step in labels]


def describe_response(prompt: str, response_text: str) -> ResponseFacts:
    """What a response did, from its text, with or without ``<eos>`` and padding.

    Raises:
        TsaeError: where the prompt is not a chain. No response is refused.
    """
    chain = parse_prompt(prompt)
    tokens = split_tokens(response_text)
    length = _length(tokens)
    labels = annotate(prompt, tokens)
    steps: dict[int, list[TokenLabel]] = {}
    for label in labels:
        if label.step is not None:
            steps.setdefault(label.step, []).append(label)
    written = [labels for labels in steps.values() if any(label.role == "result" for label in labels)]
    valid = [
        labels
        for labels in written
        if all(label.correct is not False for label in labels if label.role in ("operand", "operator"))
    ]
    skipped = max(0, chain.n_ops - len(valid))
    first_wrong = next((index for index, label in enumerate(labels) if label.correct is False), None)
    marker = next((index for index, label in enumerate(labels) if label.role == "answer_marker"), None)
    written_before = sum(label.role == "result" for label in labels[:marker])
    return ResponseFacts(
        style="scratchpad" if written else "direct",
        n_steps_required=chain.n_ops,
        n_steps_written=len(written),
        n_steps_valid=len(valid),
        n_steps_skipped=skipped,
        skipped_share=skipped / chain.n_ops,
        first_wrong=first_wrong,
        skip_index=marker if marker is not None and written_before < chain.n_ops else None,
        n_tokens=length,
        answer=given_answer(response_text),
        correct=verify(response_text, chain.answer),
    )


def _length(tokens: Sequence[str]) -> int:
    """Tokens up to and including the first <eos>, or, where there is none, without the padding at the end."""
    if EOS in tokens:
        return list(tokens).index(EOS) + 1
    length = len(tokens)
    while length and tokens[length - 1] == PAD:
        length -= 1
    return length


_Label = tuple[Role, "bool | None", "int | None"]


class _Parser:
    """Parses a response token by token."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.step = 0
        self.place: int | None = 0  # within the step: index into _STEP_ROLES; None once the step broke the grammar
        self.mode: Literal["steps", "answer", "done"] = "steps"
        self.carried = chain.digits[0]  # what the next step must start from
        self.own: list[str] = []  # tokens of the step so far
        self.n_complete = 0

    def parse(self, token: str) -> _Label:
        """The role, the judgement and the step of the next token."""
        if token == EOS:
            return "end", (None if self.mode == "done" else False), None
        if token == "#":
            # Allowed between steps, and after a step whose fault is marked already: not within one, and not
            # twice.
            allowed = self.mode == "steps" and self.place in (0, None)
            self.mode = "answer"
            return "answer_marker", (None if allowed else False), None
        if self.mode != "steps":
            answering, self.mode = self.mode == "answer", "done"
            if answering and token in _DIGITS:
                return "answer", token == self.chain.answer, None
            return "other", False, None
        return self._parse_in_step(token)

    def _parse_in_step(self, token: str) -> _Label:
        step = self.step
        if token == ";":
            finished = self.place in (len(_STEP_ROLES) - 1, None)
            self.step, self.place, self.own = step + 1, 0, []
            return "separator", (None if finished else False), step
        if self.place is None or not _fits(token, self.place):
            self.place = None
            return "other", False, step
        place, self.place = self.place, self.place + 1
        self.own.append(token)
        role = _STEP_ROLES[place]
        if role == "equals":
            return role, None, step
        if role == "result":
            self.n_complete += 1
            self.carried = int(token)
            right = apply_operator(int(self.own[0]), self.own[1], int(self.own[2]))
            return role, int(token) == right, step
        if step >= self.chain.n_ops:
            return role, False, step
        due = (str(self.carried), self.chain.operators[step], str(self.chain.digits[step + 1]))[place]
        return role, token == due, step


def _fits(token: str, place: int) -> bool:
    """Whether a token other than ; # and <eos> may stand at this place of a step."""
    role = _STEP_ROLES[place]
    if role in ("operand", "result"):
        return token in _DIGITS
    if role == "operator":
        return len(token) == 1 and token in OPERATORS
    return role == "equals" and token == "="
