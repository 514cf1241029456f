"""`python -m attnmesh`: the command line."""

from attnmesh.cli.main import main

if __name__ == "__main__":
    main()
