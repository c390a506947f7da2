"""Entry point of `torchrun -m engine.distributed`; see `engine.distributed.program`."""

import sys

from engine.distributed.program import main

if __name__ == "__main__":
    sys.exit(main())
