"""Efficiency and memory of ring context parallelism: `python bench/ring.py`, or `attnmesh bench ring`."""

from attnmesh.cli import app

if __name__ == "__main__":
    app(["bench", "ring", "--json", "bench/results/ring.json"])
