"""Ways to run a federation: the engine, the gate, and three runtimes."""
