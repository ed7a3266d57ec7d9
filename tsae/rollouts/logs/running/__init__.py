"""How an import runs: workers, spool, journal, progress bar."""
