"""`python -m topg` is `topg`."""

from __future__ import annotations

import sys

from topg.cli.main import main

sys.exit(main())
