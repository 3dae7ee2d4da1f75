"""Diagnostics for any program that JAX can trace, with or without loss scaling."""
