"""The console command `hf-moa`, for use from Python: `main(["env", "--json"])`.

Its code is in `hf_moa_cli`, beside this package, which says why.
"""

import sys

from hf_moa_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
