"""Training batches: windows of adjacent tokens, their partners, balance, and outliers."""
