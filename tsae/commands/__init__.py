"""The subcommands: each a dataclass whose fields are its options, and whose action in `actions` does the work."""
