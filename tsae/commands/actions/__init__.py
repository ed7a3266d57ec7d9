"""What each command does: `run_diff` takes the options `Diff` of the module of the same name in `options`."""
