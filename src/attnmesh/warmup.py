"""`python -m attnmesh.warmup`: the command `attnmesh warmup`."""

import sys

from attnmesh.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "warmup")
    main()
