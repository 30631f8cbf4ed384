"""Federations of real sites: each keeps its data and states on its own disk, and the server sees messages."""
