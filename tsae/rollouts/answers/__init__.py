"""Answers: check responses against reference answers, and tell which reward means success."""
