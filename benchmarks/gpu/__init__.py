"""Kernels and transfers on a GPU, checked and measured."""
