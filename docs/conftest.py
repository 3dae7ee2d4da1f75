"""The tests look for doctests in every module, but without Sphinx `conf.py` cannot be imported."""

collect_ignore = ["conf.py"]
