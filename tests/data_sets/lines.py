"""Files of rows as JSON lines, for the tests of this room."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_rows(path: Path, *rows: Mapping[str, Any]) -> str:
    """Write rows, packed where the name ends in .gz, and return the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)
