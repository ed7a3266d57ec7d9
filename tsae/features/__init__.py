"""Features: the SAE's sparse codes of every stored token, and what features respond to."""
