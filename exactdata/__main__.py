"""Run `python -m exactdata`."""

from __future__ import annotations

import sys

from exactdata.inspection import main

if __name__ == "__main__":
    sys.exit(main())
