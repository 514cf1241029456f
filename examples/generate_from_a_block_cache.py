"""Generate tokens from a block cache: prompts that share a prefix, several samples of each, all of different lengths.

    python examples/generate_from_a_block_cache.py
    python examples/generate_from_a_block_cache.py --storage int8 --samples 4

The model is one attention layer with random weights: what it says means nothing, but every step is that of a real one.
In the end everything is computed once more without a cache, and compared.
"""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from attnmesh import BlockCache, Causal, attention, check_decode_errors, paged_decode_attention, quantize
from attnmesh.ops.storage import dequantize

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--storage", default="fp32", choices=["fp32", "int8", "bfp8"], help="of keys and values")
parser.add_argument("--samples", type=int, default=3, help="of each prompt (default 3)")
parser.add_argument("--tokens", type=int, default=24, help="of the longest sample (default 24)")
args = parser.parse_args()

VOCABULARY, HEADS, KV_HEADS, DIM = 100, 8, 2, 32
MOST = 8  # tokens a sequence that one decode call takes
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
embedding = torch.randn(VOCABULARY, HEADS * DIM, device=device)
to_q, to_k, to_v = (torch.randn(HEADS * DIM, h * DIM, device=device) / 16 for h in (HEADS, KV_HEADS, KV_HEADS))


def projected(tokens):
    """Q, k and v of tokens [n, T], each [n, heads, T, DIM]. (A real model would rotate q and k by position here.)"""
    x = F.normalize(embedding[tokens], dim=-1) * 16
    return [(x @ w).unflatten(-1, (-1, DIM)).transpose(1, 2) for w in (to_q, to_k, to_v)]


def logits(out):
    """Of the tokens after these: out [n, heads, T, DIM] to [n, T, VOCABULARY]."""
    return out.transpose(1, 2).flatten(2) @ embedding.T


cache = BlockCache(
    layers=1, num_blocks=128, block_size=16, kv_heads=KV_HEADS, head_dim=DIM, storage=args.storage, device=device,
    max_sequences=4 * args.samples, max_length=256,
)  # fmt: skip


def step(sequences, tokens):
    """The same number of new tokens, up to 8, on each sequence: what comes after each, [n, T, VOCABULARY]."""
    new = cache.append(sequences, tokens)  # raises CacheFull if there is no room, and then nothing has changed
    q, k, v = projected(torch.tensor(tokens, device=device))
    rows = torch.tensor([sequence.row for sequence in sequences], device=device)
    cache.write(0, new, k, v)  # before they are read: a token sees itself
    out = paged_decode_attention(
        q, cache.keys(0), cache.values(0), cache.block_table[rows], cur_pos=cache.cur_pos[rows]
    )
    return logits(out)


def prefill(prompt):
    """A sequence that holds a prompt, and what comes after it. Only what the cache has not seen is computed."""
    sequence = cache.allocate(prompt)
    for begin in range(sequence.cached, len(prompt), MOST):
        after = step([sequence], [prompt[begin : begin + MOST]])
    return sequence, after[0, -1]


# One long introduction, and a question each: the introduction's full blocks are computed and stored once.
introduction = torch.randint(VOCABULARY, (100,)).tolist()
prompts = [introduction + torch.randint(VOCABULARY, (n,)).tolist() for n in (5, 30, 11)]
begun = []
for prompt in prompts:
    sequence, after = prefill(prompt)
    print(f"a prompt of {len(prompt)} tokens: {sequence.cached} were there already")
    begun.append((prompt, sequence, after))


@dataclass
class Sample:
    sequence: object  # what allocate or fork gave
    tokens: list[int]
    end: int  # how many tokens it will have
    said: list[torch.Tensor]  # what comes after the prompt, and after each token since


# Several samples of each prompt: forks, which share all its blocks until they go their own ways.
samples = []
for prompt, sequence, after in begun:
    twins = [sequence, *(cache.fork(sequence) for _ in range(args.samples - 1))]
    samples += [Sample(twin, list(prompt), len(prompt) + args.tokens - 5 * i, [after]) for i, twin in enumerate(twins)]
print(f"{len(samples)} samples begin in {cache.stats().used} blocks")

# All of them together, a token each, until each has had enough. Ended ones make room at once.
going = list(samples)
while going:
    for sample in going:
        sample.tokens.append(int(torch.multinomial(F.softmax(sample.said[-1], -1), 1)))
    after = step([sample.sequence for sample in going], [sample.tokens[-1:] for sample in going])
    for sample, said in zip(going, after[:, -1], strict=True):
        sample.said.append(said)
        if len(sample.tokens) >= sample.end:
            cache.free(sample.sequence)
    going = [sample for sample in going if len(sample.tokens) < sample.end]
check_decode_errors()  # on a GPU, where a fault would be reported late

stats = cache.stats()
print(f"done: {stats.used} blocks in use, {stats.cached} kept for prompts to come; hit rate {stats.hit_rate:.0%}")
assert stats.used == 0

# Without a cache: every sample at once, over keys and values as the cache stores them. (A number that lies between two
# steps may be rounded either way.)
most = 1e-5 if args.storage == "fp32" else 1e-3
for sample in samples:
    q, k, v = projected(torch.tensor([sample.tokens], device=device))
    k, v = (dequantize(quantize(x, args.storage), torch.float32) for x in (k, v))
    expected = logits(attention(q, k, v, mask=Causal()))[0, -len(sample.said) :]
    error = float((torch.stack(sample.said) - expected).norm() / expected.norm())
    assert error < most, error
again = cache.allocate(samples[0].tokens)  # a chat goes on: what was said before is found again, the answer included
assert again.cached == (len(samples[0].tokens) - 1) // 16 * 16
lengths = [len(sample.tokens) for sample in samples]
print(f"{len(samples)} samples of {min(lengths)} to {max(lengths)} tokens: as without a cache")
