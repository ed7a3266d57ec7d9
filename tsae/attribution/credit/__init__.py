"""Who did it, and what would have been without: shares, simulated effects, effects of single samples and tokens."""
