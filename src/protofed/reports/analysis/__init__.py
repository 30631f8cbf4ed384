"""Figures of the papers, drawn from the folders of finished runs."""
