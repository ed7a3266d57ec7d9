"""The subcommands: each a dataclass whose fields are its options, and whose `execute` does the work."""
