"""The guard around an optimizer: each step is either applied, or leaves no trace."""
