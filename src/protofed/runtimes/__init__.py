"""Ways to run clients: one after another, in several processes, or all together on a GPU."""
