"""Tests of libraries too large for the test group: `make oracles` installs and runs them."""

import importlib.util

# `record.py` has no tests, and needs libraries that no group installs.
has_torch = importlib.util.find_spec("torch") is not None
collect_ignore_glob = ["record.py"] if has_torch else ["record.py", "test_torch.py"]
