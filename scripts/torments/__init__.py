"""The kinds of cases of `torture.py`."""
