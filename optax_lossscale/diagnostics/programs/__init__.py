"""Diagnostics of any program that JAX can trace. They know nothing about loss scaling."""
