"""Lists the packages; everything else is in pyproject.toml.

The repository root is the package `tilewise`, which setuptools' own discovery cannot express.
"""

from setuptools import find_packages, setup

FOLDERS = ("data", "dispatch", "kernels", "models", "service")

setup(
    script_name="setup.py",  # said aloud, so that the root package does not take in this file as a module
    packages=[
        "tilewise",
        *(f"tilewise.{name}" for name in find_packages(include=[p for f in FOLDERS for p in (f, f"{f}.*")])),
    ],
)
