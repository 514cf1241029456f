"""Query-distributed causal attention on a device mesh: heads over one dimension, queries over the other.

    torchrun --nproc-per-node 32 examples/query_distributed_mesh.py
    torchrun --nproc-per-node 4 examples/query_distributed_mesh.py --head-ranks 2 --sequence-ranks 2 --prefix 500

Every rank holds the whole sequence of its heads. It computes its share of the queries, gathers the outputs of the other
ranks of its sequence dimension, and compares with torch's attention over the whole sequence.
"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from attnmesh import gather_ring_outputs, ring_distributed_attention

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--head-ranks", type=int, default=8, help="number of ranks that the heads are sharded over (default 8)"
)
parser.add_argument(
    "--sequence-ranks", type=int, default=4, help="number of ranks that the queries are sharded over (default 4)"
)
parser.add_argument("--length", type=int, default=1000, help="length of the sequence, any number (default 1000)")
parser.add_argument("--prefix", type=int, default=0, help="positions before the first query (default 0)")
args = parser.parse_args()
shape = (args.head_ranks, args.sequence_ranks)
ranks = math.prod(shape)
if not 0 <= args.prefix < args.length:
    parser.error(f"--prefix must be 0 to {args.length - 1}, got {args.prefix}")
if os.environ.get("WORLD_SIZE") != str(ranks):
    parser.error(f"a mesh of shape {shape} needs {ranks} processes: start it with torchrun --nproc-per-node {ranks}")

# GPUs only if every process has one.
device, dtype, tolerance = torch.device("cpu"), torch.float32, 1e-6
if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    device, dtype, tolerance = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16, 1e-2
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("heads", "sequence"))

# Four query heads and one KV head per rank of the heads dimension. One seed, so that all ranks draw the same inputs.
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads * args.head_ranks, args.length, 64) for heads in (4, 1, 1))
head_rank = mesh["heads"].get_local_rank()
q, k, v = (x.chunk(args.head_ranks, dim=1)[head_rank].to(device, dtype) for x in (q, k, v))

# The queries of the positions after the prefix; keys and values of all positions.
queries = args.length - args.prefix
local = ring_distributed_attention(q[:, :, args.prefix :], k, v, q_offset=args.prefix, group=mesh["sequence"])
out = gather_ring_outputs(local, length=queries, group=mesh["sequence"])

expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[:, :, args.prefix :]
error = float((out - expected).norm() / expected.norm())
share = f"heads of group {head_rank}, {local.shape[2]} of {queries} queries"
print(f"rank {dist.get_rank()}: {share}, relative error {error:.0e}", flush=True)
assert error < tolerance
dist.destroy_process_group()
