"""What `torture.py` needs: commands, small artefacts for them, processes that meet faults, and inputs with faults."""
