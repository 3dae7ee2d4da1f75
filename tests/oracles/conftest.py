"""Tests of libraries too large for the test group: `make oracles` installs and runs them."""

import importlib.util

# The script contains no tests, and needs libraries that no group installs.
collect_ignore_glob = ["record.py"]
if not importlib.util.find_spec("torch"):
    collect_ignore_glob.append("test_torch.py")
