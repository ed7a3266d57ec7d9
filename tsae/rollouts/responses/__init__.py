"""Responses: what the tokens and the text of one response are."""
