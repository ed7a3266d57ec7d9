"""The run taken again from base, log and settings: shares along its path, and trainings without some samples."""
