"""Starts of scripts for a fresh process that lacks packages, as a stranger's machine does."""

NO_OSPREY = """
import sys

class NoOsprey:
    def find_spec(self, name, path=None, target=None):
        if name == "osprey" or name.startswith("osprey."):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoOsprey())
"""

NO_EXTRAS = """
import sys

sys.modules.update(dict.fromkeys(("datasets", "pyarrow", "trl")))  # what comes with the extra `train`
"""
