"""`python -m attnmesh`: the command line."""

from attnmesh.cli.main import app

if __name__ == "__main__":
    app(prog_name="attnmesh")
