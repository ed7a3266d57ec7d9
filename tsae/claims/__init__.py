"""What the literature says about sample difficulty in RLVR, each claim as a test with a verdict."""
