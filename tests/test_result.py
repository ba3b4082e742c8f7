"""The result schema is what the structs say."""

from __future__ import annotations

import json
from pathlib import Path

from equivcheck.result import schema

ROOT = Path(__file__).resolve().parents[1]


def test_the_committed_schema_is_generated_from_the_structs() -> None:
    committed = json.loads((ROOT / "equivcheck" / "result.schema.json").read_text(encoding="utf-8"))
    assert committed == json.loads(json.dumps(schema())), "run `make schema`"
