"""The run taken again: its updates from base, log and settings; shares along that path; trainings without some samples."""
