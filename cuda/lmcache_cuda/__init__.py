"""GPU kernels and their loader."""
