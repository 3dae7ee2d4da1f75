"""Libraries too large for the test group: collected where they are installed, by `make oracles`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_torch_*.py"]
