"""RUNTIMES: every way to run a federation, by name."""

from protofed.runtimes.jobs import Runtime
from protofed.runtimes.sequential import Sequential

RUNTIMES: dict[str, type[Runtime]] = {"sequential": Sequential}
