"""What else could explain a contrast: confounds, nulls and baselines."""
