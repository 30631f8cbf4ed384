"""Losses of methods as GPU kernels, in Triton."""
