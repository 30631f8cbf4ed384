"""Federated learning with prototypes, on PyTorch."""
