"""Shared helpers: argument checks and pytrees."""
