"""Features for other tools: the caches and exports that they read."""
