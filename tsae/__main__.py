"""`python -m tsae`."""

from tsae.cli import main

main()
