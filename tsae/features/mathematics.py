"""An annotator for mathematical reasoning in English: what every token of a response does.

Rules on sentences and spans of the text; a later rule overrides an earlier one:

1. *restating*: a sentence with a number and without an operation or a conclusion (“so”, “means”). All of its numbers
   and 70 % of its content words stand in the prompt.
2. *planning*: a sentence that says what to do, up to a colon or an operation: “first find …”, “we need to …”.
3. *hesitation*: “hmm”, “maybe”, “not sure”, “I think”; from the word to the end of its clause.
4. *checking*: a sentence with “wait”, “check”, “verify”, “that's not right”, “let me redo”. Backtracking is checking.
5. *arithmetic*: expressions of two or more numbers, such as ``16 - 3 = 13``, and calculator annotations.
6. *answer statement*: “A: 5”, “#### 5”, “the answer is 5”, a box.

All else is *other*. docs/measured.md says how precise the rules are on GSM8K's solutions. Give
``tsae.features.mathematics:math_classes`` as the annotator of a diff.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from tsae.rollouts.behaviours import answer_spans

CLASSES = ("other", "restating", "planning", "hesitation", "checking", "arithmetic", "answer statement")
FAMILIES = {
    "direct-answer": ("answer statement",),
    "basic-computation": ("arithmetic",),
    "deliberation": ("planning", "checking", "hesitation"),
}
"""For `tsae.diff.descriptions`."""

# Texts are written by models and strangers: no pattern here takes more than linear time.
_SENTENCE = re.compile(r"[^\n.!?]+(?:[.!?](?!\s|\Z)[^\n.!?]+)*[.!?]?")
_CLAUSE_END = re.compile(r"[,;.!?\n]")
_VERB = "(?:find|calculate|compute|determine|figure|add|subtract|multiply|divide|solve|work|convert)"
_PLANNING = re.compile(
    rf"^\W*(?:(?:first(?:ly)?|next|now|then|finally),? (?:we|i|let|{_VERB})\b|"
    rf"to (?:find|solve|get|determine|calculate|compute|figure)\b)|"
    r"\blet(?:'|’)?s\b|\blet us\b|\blet me (?:start|find|calculate|compute|think|break|try)\b|"
    r"\b(?:we|i) (?:will |'ll )?(?:first |then |now )?(?:need|have|want|must|are going|should) (?:to )?"
    rf"(?:know|{_VERB})\b|\blet [a-z] (?:be|equal|represent)\b|"
    r"\bthe (?:first|next|last|final) (?:step|thing)\b|\bstep \d+\s*:",
    re.IGNORECASE,
)
_HESITATION = re.compile(
    r"\b(?:hmm+|umm*|uh|maybe|perhaps|possibly|probably|not (?:quite |entirely )?sure|unsure|i (?:think|guess|suppose)|"
    r"unclear|ambiguous|confus(?:ed|ing))\b",
    re.IGNORECASE,
)
_CHECKING = re.compile(
    r"^\W*(?:wait|actually|no,|but wait|hold on|oops)\b|\b(?:double[- ]?check|let(?:'|’)?s check|"
    r"let me (?:check|verify|re\w+)|to check|verify|verifying|check (?:that|this|if|whether|our|my|the answer)|"
    r"i made a mistake|made an error|"
    r"(?:is|was|be|seems?) (?:wrong|incorrect)|(?:is not|isn't|not|doesn't seem) right|start over|"
    r"(?:let me|let(?:'|’)?s) (?:go back|try again)|"
    r"backtrack|reconsider)\b",
    re.IGNORECASE,
)
_NUMBER = r"[-−]?[$€£]?\d[\d,]{0,24}(?:\.\d{1,24})?%?"
_OPERATOR = r"[+\-−–*/×÷·xX=^]|\\times|\\div|\\cdot"
# A number with up to three words of a unit may stand on the left of an operator with spaces.
_UNIT = r"(?:(?:\s?/\s?|\s)[a-zA-Z]{1,20}){1,3}(?=\s[+\-−*/×÷=]\s[$(<\d.])"
_CONCLUSION = re.compile(r"\b(?:so|thus|hence|therefore|means?|total|altogether)\b", re.IGNORECASE)
_ARITHMETIC = re.compile(
    rf"<<[^<>]{{0,200}}>>(?:{_NUMBER})?|[($]{{0,3}}(?:{_NUMBER}|\.\d{{1,24}})[)]{{0,2}}(?:{_UNIT})?"
    rf"(?:\s?(?:{_OPERATOR})\s?[($]{{0,3}}(?:<<[^<>]{{0,200}}>>)?(?:{_NUMBER}|\.\d{{1,24}})[)]{{0,2}}(?:{_UNIT})?)+"
    rf"(?:\s?=)?"
)
_WORD = re.compile(r"[a-z]{4,}|\d[\d,]*(?:\.\d+)?")
_COMMON = frozenset(
    ["that", "this", "then", "than", "there", "their", "they", "them", "have", "with", "from", "will", "would", "what"]
)


def math_classes(prompt: str, response: Sequence[str]) -> list[str]:
    """One of `CLASSES` for every response token: the class of its first character that is not a space.

    The tokens' texts together are the response.
    """
    text = "".join(response)
    of_character = character_classes(prompt, text)
    found, start = [], 0
    for token in response:
        at = min(start + len(token) - len(token.lstrip()), start + max(len(token) - 1, 0))
        found.append(CLASSES[of_character[at]] if token else CLASSES[0])
        start += len(token)
    return found


def character_classes(prompt: str, text: str) -> np.ndarray:
    """(len(text),) index into `CLASSES` of every character of a response."""
    found = np.zeros(len(text), dtype=np.int8)
    asked = _content(prompt)
    for match in _SENTENCE.finditer(text):
        sentence, (start, end) = match.group(), match.span()
        content, arithmetic = _content(sentence), _ARITHMETIC.search(sentence)
        numbers = {word for word in content if word[0].isdigit()}
        concluded = arithmetic or _CONCLUSION.search(sentence)
        repeats = numbers <= asked and len(content & asked) >= 0.7 * len(content)
        if numbers and len(content) >= 3 and repeats and not concluded:
            found[start:end] = CLASSES.index("restating")
        if _PLANNING.search(sentence):
            ends = [sentence.find(":") + 1 or len(sentence), arithmetic.start() if arithmetic else len(sentence)]
            found[start : start + min(ends)] = CLASSES.index("planning")
        for word in _HESITATION.finditer(sentence):
            close = _CLAUSE_END.search(sentence, word.end())
            found[start + word.start() : start + (close.start() if close else len(sentence))] = CLASSES.index(
                "hesitation"
            )
        if _CHECKING.search(sentence):
            found[start:end] = CLASSES.index("checking")
    for match in _ARITHMETIC.finditer(text):
        found[match.start() : match.end()] = CLASSES.index("arithmetic")
    for start, end in answer_spans(text):
        found[start:end] = CLASSES.index("answer statement")
    return found


def _content(text: str) -> set[str]:
    return {word.rstrip(",").replace(",", "") for word in _WORD.findall(text.lower())} - _COMMON
