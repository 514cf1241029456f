"""Run `axolotl train` with configuration files, each in a given number of CPU ranks: one import serves all runs.

    python axolotl_runs.py 1 one.yml 2 two.yml

axolotl is imported once, which takes most of the time, and every rank is a fork. The exit code is the number of runs
that failed.
"""

import os
import socket
import sys
import traceback


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(rank: int, world: int, port: int, config: str) -> int:
    process = os.fork()
    if process:
        return process
    sys.argv = ["axolotl"]
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    code = 1
    try:
        do_cli(config)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import axolotl.core.builders
    import axolotl.loaders.model
    import axolotl.train
    from axolotl.cli.train import do_cli

    failed = 0
    for world, config in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        port = free_port()
        ranks = [start(rank, int(world), port, config) for rank in range(int(world))]
        codes = [os.waitpid(process, 0)[1] for process in ranks]
        print(f"{config}: {codes}", flush=True)
        failed += any(codes)
    sys.exit(failed)
