"""Tests of libraries too large for the test group: `make oracles` installs and runs them."""

import importlib.util

# `record.py` has no tests, and needs libraries that no group installs.
collect_ignore_glob = ["record.py"]
for needed, test in (
    ("torch", "test_torch.py"),
    ("flowjax", "test_trainers.py"),
    ("optimistix", "test_optimistix.py"),
):
    if importlib.util.find_spec(needed) is None:
        collect_ignore_glob.append(test)
