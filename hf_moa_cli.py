"""The entry point of the console command `hf-moa`, whose code is in `hf_moa/cli/`.

`import hf_moa` registers its classes with transformers, and so imports torch. If this module was
imported before, `hf_moa` registers them only when a command needs them, so that `--help` does not wait.
From Python, use `hf_moa.cli.main`.
"""

from hf_moa.cli import main

__all__ = ["main"]
