"""`python -m hf_moa` is `hf-moa`, but slower to help: Python imports the package first, and so torch."""

import sys

from hf_moa.cli import main

if __name__ == "__main__":
    sys.exit(main())
