"""Running the example scripts in tests, and reading what they wrote."""

import json
from pathlib import Path


def command_line(arguments):
    """`{"a": [1, 2], "b": None}` -> `["--a", "1", "2"]`."""
    args = []
    for name, value in arguments.items():
        if value is not None:
            args += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return args


def read_json(arguments, name):
    return json.loads(Path(arguments["output_dir"], name).read_text(encoding="utf-8"))
