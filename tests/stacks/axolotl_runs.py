"""Run axolotl's command `train` several times, over CPU ranks: `python axolotl_runs.py RUNS.json`.

The file has a list of runs [ranks, configuration file, changes of the configuration]. axolotl is imported once, which
takes most of the time, and every rank is a fork. The exit code is the number of runs that failed.
"""

import json
import os
import socket
import sys
import traceback
from pathlib import Path


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def start(rank, world, port, train, config, changes):
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
        train(config, **changes)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    import axolotl.core.builders
    import axolotl.loaders.model
    import axolotl.train  # noqa: F401
    from axolotl.cli.train import do_cli

    failed = 0
    for world, config, changes in json.loads(Path(sys.argv[1]).read_text()):
        port = free_port()
        ranks = [start(rank, world, port, do_cli, config, changes) for rank in range(world)]
        codes = [os.waitpid(process, 0)[1] for process in ranks]
        failed += any(codes)
    sys.exit(failed)
