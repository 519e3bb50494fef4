"""The start of a script for a fresh process in which the package cannot be imported, as on a stranger's machine."""

NO_OSPREY = """
import sys

class NoOsprey:
    def find_spec(self, name, path=None, target=None):
        if name == "osprey" or name.startswith("osprey."):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, NoOsprey())
"""
