"""One module for each trainer's format.

docs/logs.md says what each log means. A new format gets a module here and a place in `logs.detect.FORMATS`.
"""
