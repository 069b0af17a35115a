"""Run PEFT's own tests on FTG adapters: of PEFT's toy modules, and of the gated models.

    python tests/upstream/run_peft.py                    # downloads the tests with pip
    python tests/upstream/run_peft.py peft-0.21.2        # an unpacked source distribution
    python tests/upstream/run_peft.py -k merge

All takes some minutes on one core. The default `pytest` collects nothing of this folder. Arguments that
are not listed go to pytest, in the form `--name=value` where they take a value.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; return pytest's exit code."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "modeling")]
    import peft
    import pytest
    import source

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "source", nargs="?", type=Path, metavar="SOURCE", help="source tree of the installed PEFT"
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "hf_moa" / "upstream")
    parser.add_argument("-k", metavar="EXPRESSION", help="as pytest's")
    options, rest = parser.parse_known_args(arguments)

    try:
        tree = options.source or source.download(peft, options.cache)
        source.install(peft, tree.resolve())
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    if options.k:
        rest += ["-k", options.k]

    class Selection:
        """Leaves out the tests of other methods, and skips those that do not apply."""

        def pytest_collection_modifyitems(self, config, items):
            import ftg_adapters

            others = [item for item in items if not ftg_adapters.is_about_ftg(item)]
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if item not in others]
            for item in items:
                reason = ftg_adapters.inapplicable(item)
                if reason is not None:
                    item.add_marker(pytest.mark.skip(reason=reason))

    quiet = ["-o", "addopts=", "-p", "no:cacheprovider", "--disable-warnings"]
    return pytest.main([str(HERE / "ftg_adapters.py"), *quiet, *rest], plugins=[Selection()])


if __name__ == "__main__":
    sys.exit(main())
