"""Builds kernels with other tile numbers and measures them side by side: python -m bench.tune --help."""
