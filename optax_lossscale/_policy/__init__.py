"""Policies: when the loss scale changes."""
