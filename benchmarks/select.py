"""What a selection costs; see selection.py.

    python benchmarks/select.py [--json] [--arch h200] [--bundle FOLDER]

Python looks in the folder of a script first, where this file hides the standard library's `select` from every benchmark
beside it. Imported by that name, it steps aside.
"""

import sys

if __name__ == "select":
    import importlib

    here = __file__.replace("\\", "/").rpartition("/")[0]
    kept = sys.path[:]
    sys.path[:] = [entry for entry in kept if entry.replace("\\", "/").rstrip("/") != here]
    del sys.modules[__name__]
    sys.modules[__name__] = importlib.import_module(__name__)
    sys.path[:] = kept
elif __name__ == "__main__":
    from selection import main  # type: ignore[import-not-found]

    main()
