"""What each command may be told: dataclasses whose fields are its options. Light, so that --help is quick."""
