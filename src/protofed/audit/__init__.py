"""What an attacker learns from a run: measured on the run itself."""
