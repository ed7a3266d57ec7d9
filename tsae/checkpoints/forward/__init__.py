"""Forward passes: read and rewrite residual streams, and get what the model predicts."""
