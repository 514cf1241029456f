"""Generate tokens from a block cache: prompts that share a prefix, several samples per prompt, of different lengths.

    python examples/generate_from_a_block_cache.py
    python examples/generate_from_a_block_cache.py --storage int8 --samples 4

The model is one attention layer with random weights, so its output is meaningless, but every step is that of a real
model. At the end everything is computed again without a cache, and compared.
"""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attnmesh import BlockCache, CacheSpec, Causal, attention, paged_decode_attention, quantize
from attnmesh.decode import check_decode_errors, paged_prefill_attention
from attnmesh.ops.storage import dequantize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument(
    "--storage", default="fp32", choices=["fp32", "int8", "bfp8"], help="storage type of the KV cache (default fp32)"
)
parser.add_argument("--samples", type=int, default=3, help="samples per prompt (default 3)")
parser.add_argument("--tokens", type=int, default=24, help="new tokens of the longest sample (default 24)")
args = parser.parse_args()

VOCABULARY, HEADS, KV_HEADS, DIM = 100, 8, 2, 32
MAX_DECODE_TOKENS = 8  # per sequence and call of paged_decode_attention
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
embedding = torch.randn(VOCABULARY, HEADS * DIM, device=device)
to_q, to_k, to_v = (torch.randn(HEADS * DIM, h * DIM, device=device) / 16 for h in (HEADS, KV_HEADS, KV_HEADS))


def project(tokens):
    """q, k and v of tokens [n, T], each [n, heads, T, DIM]. (A real model would apply rotary embeddings here.)"""
    x = F.normalize(embedding[tokens], dim=-1) * 16
    return [(x @ w).unflatten(-1, (-1, DIM)).transpose(1, 2) for w in (to_q, to_k, to_v)]


def logits(out):
    """Logits [n, T, VOCABULARY] of the next tokens, from out [n, heads, T, DIM]."""
    return out.transpose(1, 2).flatten(2) @ embedding.T


cache = BlockCache(
    CacheSpec(layers=1, kv_heads=KV_HEADS, head_dim=DIM, storage=args.storage),
    num_blocks=128,
    block_size=16,
    device=device,
    max_sequences=4 * args.samples,
    max_length=256,
)


def step(sequences, tokens):
    """Append T tokens to each of n sequences, and return the logits [n, T, VOCABULARY] after each."""
    new = cache.append(sequences, tokens)  # raises CacheFull, without any change, if no blocks are free
    q, k, v = project(torch.tensor(tokens, device=device))
    rows = torch.tensor([sequence.row for sequence in sequences], device=device)
    cache.write(0, new, k, v)  # before attention, since a token attends to itself
    attend = paged_decode_attention if q.shape[2] <= MAX_DECODE_TOKENS else paged_prefill_attention
    out = attend(q, cache.keys(0), cache.values(0), cache.block_table[rows], cur_pos=cache.cur_pos[rows])
    return logits(out)


def prefill(prompt):
    """A sequence with the prompt and the logits after it. Only tokens that are not in the cache are computed."""
    sequence = cache.allocate(prompt)
    logits_after = step([sequence], [prompt[sequence.cached :]])
    return sequence, logits_after[0, -1]


# Prompts share a long prefix, whose full blocks are computed and stored once.
prefix = torch.randint(VOCABULARY, (100,)).tolist()
prompts = [prefix + torch.randint(VOCABULARY, (n,)).tolist() for n in (5, 30, 11)]
prefilled = []
for prompt in prompts:
    sequence, last_logits = prefill(prompt)
    print(f"prompt of {len(prompt)} tokens: {sequence.cached} from the cache")
    prefilled.append((prompt, sequence, last_logits))


@dataclass
class Sample:
    sequence: object  # of the cache
    tokens: list[int]
    length: int  # number of tokens at the end
    logits: list[torch.Tensor]  # after the prompt, and after each token since


# Several samples per prompt: forks, which share all blocks of the prompt until they diverge.
samples = []
for prompt, sequence, last_logits in prefilled:
    forks = [sequence, *(cache.fork(sequence) for _ in range(args.samples - 1))]
    samples += [
        Sample(fork, list(prompt), len(prompt) + args.tokens - 5 * i, [last_logits]) for i, fork in enumerate(forks)
    ]
print(f"{len(samples)} samples start in {cache.stats().used} blocks")

# One token per sample and step. Samples that are done free their blocks at once.
running = list(samples)
while running:
    for sample in running:
        sample.tokens.append(int(torch.multinomial(F.softmax(sample.logits[-1], -1), 1)))
    following = step([sample.sequence for sample in running], [sample.tokens[-1:] for sample in running])
    for sample, row in zip(running, following[:, -1], strict=True):
        sample.logits.append(row)
        if len(sample.tokens) >= sample.length:
            cache.free(sample.sequence)
    running = [sample for sample in running if len(sample.tokens) < sample.length]
check_decode_errors()  # on a GPU errors are reported asynchronously

stats = cache.stats()
print(f"done: {stats.used} blocks in use, {stats.cached} cached for later prompts; hit rate {stats.hit_rate:.0%}")
assert stats.used == 0

# Without a cache: every sample at once, over keys and values quantized as in the cache. (Values halfway between two
# quantization steps may be rounded either way.)
tolerance = 1e-5 if args.storage == "fp32" else 1e-3
for sample in samples:
    q, k, v = project(torch.tensor([sample.tokens], device=device))
    k, v = (dequantize(quantize(x, args.storage), torch.float32) for x in (k, v))
    expected = logits(attention(q, k, v, mask=Causal()))[0, -len(sample.logits) :]
    error = float((torch.stack(sample.logits) - expected).norm() / expected.norm())
    assert error < tolerance, error
again = cache.allocate(samples[0].tokens)  # a chat continues: its blocks are reused, the answer's included
assert again.cached == (len(samples[0].tokens) - 1) // 16 * 16
lengths = [len(sample.tokens) for sample in samples]
print(f"{len(samples)} samples of {min(lengths)} to {max(lengths)} tokens: equal to those without a cache")
