"""Run transformers' own model tests on the gated classes.

    python tests/upstream/run.py                                  # downloads the tests with pip
    python tests/upstream/run.py transformers-5.23.0              # an unpacked source distribution
    python tests/upstream/run.py --family T5 --variant mae -k resize
    python tests/upstream/run.py --variant plain                  # transformers' own classes

All takes a quarter of an hour on one core. It needs `pip install parameterized`; with `pytest-timeout`
installed, a test that hangs fails. The default `pytest` collects nothing of this folder. Arguments that
are not listed go to pytest, in the form `--name=value` where they take a value.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; return pytest's exit code."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "modeling")]
    import pytest
    import source
    import transformers
    from testers import SUITES, VARIANTS

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "source",
        nargs="?",
        type=Path,
        metavar="SOURCE",
        help="source tree of the installed transformers",
    )
    parser.add_argument(
        "--family",
        action="append",
        choices=[suite.name for suite in SUITES],
        help="may be given several times; default: all",
    )
    parser.add_argument(
        "--variant",
        action="append",
        choices=VARIANTS,
        help="may be given several times; default: all gated",
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "hf_moa" / "upstream")
    parser.add_argument("-k", metavar="EXPRESSION", help="as pytest's")
    parser.add_argument("--timeout", type=int, default=180, help="seconds for one test")
    options, rest = parser.parse_known_args(arguments)

    try:
        tree = options.source or source.download(transformers, options.cache)
        source.install(transformers, tree.resolve())
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    chosen = [
        f"{HERE / 'moa_models.py'}::{suite.title(variant)}"
        for suite in SUITES
        for variant in options.variant or [name for name in VARIANTS if name != "plain"]
        if not options.family or suite.name in options.family
    ]
    if options.k:
        rest += ["-k", options.k]
    if importlib.util.find_spec("pytest_timeout"):
        rest.append(f"--timeout={options.timeout}")
    # The markers are transformers': the repository's own selection and strictness do not suit them.
    quiet = ["-W", "ignore::pytest.PytestUnknownMarkWarning", "--disable-warnings"]
    return pytest.main([*chosen, "-o", "addopts=", "-p", "no:cacheprovider", *quiet, *rest])


if __name__ == "__main__":
    sys.exit(main())
