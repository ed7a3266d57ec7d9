"""The logs that are shipped with the tests."""

from __future__ import annotations

from pathlib import Path

LOGS = Path(__file__).parents[1] / "logs"


TEMPLATE = (
    "{% for m in messages %}<bos>{{ '#' if m['role'] == 'user' else '*' }}{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<bos>;{% endif %}"
)


def broken(response: str, answer: str) -> bool:
    return 1 / int(answer) > 0


def short(response: str, answer: str) -> bool:
    return len(response) < 3
