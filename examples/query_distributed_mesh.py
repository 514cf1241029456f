"""Query-distributed causal attention on a mesh of devices: heads over one dimension, the sequence over the other.

    torchrun --nproc-per-node 32 examples/query_distributed_mesh.py
    torchrun --nproc-per-node 4 examples/query_distributed_mesh.py --heads-ways 2 --sequence-ways 2

Every rank has the whole sequence of its own heads. It answers its share of the queries, gathers what the other ranks of
its sequence dimension have answered, and compares with torch's attention over everything.
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
parser.add_argument("--heads-ways", type=int, default=8, help="how many ranks share the heads (default 8)")
parser.add_argument("--sequence-ways", type=int, default=4, help="how many ranks share the queries (default 4)")
parser.add_argument("--length", type=int, default=1000, help="of the sequence; need not divide (default 1000)")
args = parser.parse_args()
shape = (args.heads_ways, args.sequence_ways)
ranks = math.prod(shape)
if os.environ.get("WORLD_SIZE") != str(ranks):
    parser.error(f"a mesh of shape {shape} needs {ranks} processes: start it with torchrun --nproc-per-node {ranks}")

# A GPU for every process, or none for all of them.
device, dtype, most = torch.device("cpu"), torch.float32, 1e-6
if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    device, dtype, most = torch.device("cuda", int(os.environ["LOCAL_RANK"])), torch.bfloat16, 1e-2
    torch.cuda.set_device(device)
mesh = init_device_mesh(device.type, shape, mesh_dim_names=("heads", "sequence"))

# Four query heads and one kv head for each of the heads' ways; one seed, so that all ranks have the same.
torch.manual_seed(0)
q, k, v = (torch.randn(1, heads * args.heads_ways, args.length, 64) for heads in (4, 1, 1))
way = mesh["heads"].get_local_rank()
q, k, v = (x.chunk(args.heads_ways, dim=1)[way].to(device, dtype) for x in (q, k, v))

local = ring_distributed_attention(q, k, v, group=mesh["sequence"])
out = gather_ring_outputs(local, length=args.length, group=mesh["sequence"])

plain = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
error = float((out - plain).norm() / plain.norm())
place = f"way {way} of the heads, {local.shape[2]} of {args.length} queries"
print(f"rank {dist.get_rank()}: {place}, off torch's attention by {error:.0e}", flush=True)
assert error < most
dist.destroy_process_group()
