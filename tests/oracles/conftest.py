"""Libraries too large for the test group: collected where they are installed, by `make oracles`."""

import importlib.util

# The record scripts hold no tests, and need libraries that no group installs.
collect_ignore_glob = ["record_*.py"]
if not importlib.util.find_spec("torch"):
    collect_ignore_glob.append("test_torch.py")
