"""One module for each trainer's format.

docs/logs.md says what each log means. A new format gets a module here, a place in `log_detection.FORMATS`, a line in
`logs.known.KNOWN`, and a name in `rollouts.config.LogFormat`. One that is neither JSON lines nor a table also needs a
reader in `logs.on_disk.containers`.
"""
