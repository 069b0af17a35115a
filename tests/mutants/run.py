"""Show that the tests notice faults: put one at a time into a copy of the package, and run its tests.

    python tests/mutants/run.py                                   # all, in about ten minutes
    python tests/mutants/run.py mae-window cct-threshold          # some
    python tests/mutants/run.py --jobs 2 --output mutants.json    # goes on where it was stopped

A mutant is killed when one of its tests fails, and that test passes without the mutant. The exit code is
1 if one is not. `mutants.py` has the list.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mutants import MUTANTS, PACKAGE, Mutant

ROOT = Path(__file__).resolve().parents[2]
COPIED = (PACKAGE, "tests", "pyproject.toml")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::[\w:]+(?:\[.*?\](?= - |$))?)(?: - (.*))?$", re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants; return the exit code."""
    options = _parse(arguments)
    chosen = [mutant for mutant in MUTANTS if not options.names or mutant.name in options.names]
    for mutant in chosen:
        mutant.apply((ROOT / PACKAGE / mutant.file).read_text())  # or say at once what does not fit
    found = _read(options.output)
    done = [mutant.name for mutant in chosen if found.get(mutant.name, {}).get("killed_by")]
    left = [mutant for mutant in chosen if mutant.name not in done]
    if done:
        print(f"{len(done)} of {len(chosen)} were killed before")
    copies: queue.Queue[Path] = queue.Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(min(options.jobs, len(left))):
            copies.put(_copy(Path(folder, str(job))))
        runs = [pool.submit(_run_in_one_of, copies, mutant, options.timeout) for mutant in left]
        try:
            for number, run in enumerate(as_completed(runs), start=1):
                result = run.result()
                found[result["name"]] = result
                _write(options.output, found)
                print(f"[{number}/{len(left)}] {_line(result)}", flush=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interruption waits for no others
    results = [found[mutant.name] for mutant in chosen]
    print(_table(results))
    alive = [result["name"] for result in results if not result["killed_by"]]
    print(
        f"{len(results) - len(alive)} of {len(results)} killed"
        + "".join(f"\n- {name}" for name in alive)
    )
    return 1 if alive else 0


def run_mutant(copy: Path, mutant: Mutant, *, timeout: int) -> dict:
    """Put a mutant into a copy of the package, run its tests, and take it out again.

    Returns:
        `name`, `fault`, `killed_by` (a test, or None), `error` (what that test raised), `why_not` (where
        there is no such test) and `seconds`.
    """
    start = time.monotonic()
    file = copy / PACKAGE / mutant.file
    source = file.read_text()
    selection = [f"tests/{each}" for each in mutant.tests] + (["-k", mutant.only] if mutant.only else [])
    file.write_text(mutant.apply(source))
    try:
        code, output = _pytest(copy, selection, timeout)
    finally:
        file.write_text(source)
    test, why_not = None, "survived"
    failed = _FAILED.search(output)
    if code == 1 and failed:
        # what fails without the mutant says nothing of it
        control, _ = _pytest(copy, [failed[1]], timeout)
        test, why_not = (failed[1], None) if control == 0 else (None, f"{failed[1]} fails without it")
    elif code != 0:
        why_not = f"pytest ended with {code}: {output[-2000:]}"
    return {
        "name": mutant.name,
        "fault": mutant.fault,
        "killed_by": test,
        "error": failed[2] if test else None,
        "why_not": why_not,
        "seconds": round(time.monotonic() - start, 1),
    }


def _run_in_one_of(copies: queue.Queue[Path], mutant: Mutant, timeout: int) -> dict:
    copy = copies.get()
    try:
        return run_mutant(copy, mutant, timeout=timeout)
    finally:
        copies.put(copy)


def _pytest(copy: Path, selection: Sequence[str], timeout: int) -> tuple[int | str, str]:
    """pytest's exit code and output, in a copy; the code "timeout" for one that takes too long."""
    environment = os.environ | {
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",  # which would stand for a file that changes within a second
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "400",  # or the names of tests are cut
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run(
            [*command, "--disable-warnings", *selection],
            cwd=copy,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return "timeout", ""
    return run.returncode, run.stdout + run.stderr


def _copy(folder: Path) -> Path:
    """A copy of what the tests need.

    Raises:
        RuntimeError: Python would import another package than the copy's.
    """
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, folder / name)
    command = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    imported = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if not imported.stdout.startswith(str(folder)):
        raise RuntimeError(
            f"the tests must import {PACKAGE} from {folder} (got {imported.stdout}{imported.stderr})."
        )
    return folder


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutants; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument(
        "--output", type=Path, help="JSON of the results; what was killed in it is not run again"
    )
    parser.add_argument("--timeout", type=int, default=600, help="seconds for the tests of a mutant")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"there are no mutants {', '.join(sorted(unknown))}")
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1 (got {options.jobs})")
    return options


def _read(output: Path | None) -> dict[str, dict]:
    if output is None or not output.exists():
        return {}
    return {result["name"]: result for result in json.loads(output.read_text())}


def _write(output: Path | None, found: dict[str, dict]) -> None:
    if output is not None:
        # whole or not there, should this be stopped
        partial = output.with_name(f"{output.name}.partial")
        partial.write_text(json.dumps(list(found.values()), indent=1) + "\n")
        partial.replace(output)


def _line(result: dict) -> str:
    return f"{result['name']}: {result['killed_by'] or result['why_not']} ({result['seconds']} s)"


def _table(results: list[dict]) -> str:
    lines = ["| mutant | killed by | seconds |", "|---|---|---|"]
    for result in results:
        killed_by = result["killed_by"] or f"**{result['why_not'].splitlines()[0]}**"
        lines.append(f"| {result['name']} | `{killed_by}` | {result['seconds']} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
