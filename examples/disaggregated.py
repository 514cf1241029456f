"""Some ranks prefill prompts, others decode their answers, and KV caches move between them while both work.

    python examples/disaggregated.py                              # 2 + 2 virtual ranks in this process
    python examples/disaggregated.py --prefill 3 --decode 2       # any numbers of ranks
    torchrun --nproc-per-node 4 examples/disaggregated.py         # processes: NCCL with one GPU each, or gloo

The prefill ranks compute a batch of prompts by context parallelism, each a zigzag part of every prompt. `reshard` moves
its keys and values to the decode ranks, which shard them by heads or positions. While these decode, the prefill ranks
compute the next batch: both meet only to move a cache. The last token of a prompt is left to the decode ranks, so that
nothing but keys and values moves. At the end a single rank generates the same prompts, and the tokens are compared.

The model is the Llama of `generate_over_ranks.py`. Needs `pip install "attnmesh[hf]"`.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from transformers import DynamicCache, LlamaForCausalLM

import attnmesh.comm as comms
from attnmesh import (
    Comm,
    ContextParallel,
    DecodeSharding,
    PrefillKV,
    ShardedCache,
    Zigzag,
    comm_from,
    register_attention,
    reshard,
    run_virtual,
    shard_inputs,
)
from generate_over_ranks import MAX_LENGTH, VOCABULARY, ShardedLlama, generate, small_llama

Batch = list[list[int]]
STEPS_PER_MOVE = 5  # decode steps between two moves


@torch.no_grad()
def prefill(model: LlamaForCausalLM, ranks: ContextParallel, prompts: Batch) -> PrefillKV:
    """The keys and values of this rank's part of prompts of one length, without their last tokens."""
    ids = torch.tensor([prompt[:-1] for prompt in prompts], device=model.device)
    cache = DynamicCache(config=model.config)
    model.model(**{**shard_inputs(ranks, ids), "past_key_values": cache, "use_cache": True})
    keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
    return PrefillKV(keys, values, ranks.layout, ids.shape[1], ranks.rank, ranks.world, ids.tolist())


class Decoding:
    """A batch of prompts whose answers are decoded."""

    def __init__(self, llama: ShardedLlama, cache: ShardedCache, prompts: Batch, count: int) -> None:
        self._llama, self._cache, self._count = llama, cache, count
        self._sequences = [cache.sequences[row] for row in range(len(prompts))]
        self._next = [prompt[-1:] for prompt in prompts]
        self.answers: Batch = [[] for _ in prompts]

    @property
    def is_finished(self) -> bool:
        return len(self.answers[0]) == self._count

    def step(self) -> None:
        """The next token of every answer."""
        best = self._llama.step(self._cache, self._sequences, self._next).argmax(-1).tolist()
        for answer, token in zip(self.answers, best, strict=True):
            answer.append(token)
        self._next = [answer[-1:] for answer in self.answers]


def run_rank(
    comm: Comm, models: tuple[LlamaForCausalLM, LlamaForCausalLM], batches: list[Batch], count: int, prefill_ranks: int
) -> tuple[list[Batch], list[tuple[float, float]]]:
    """The answers of all batches, on decode ranks, and when this rank was working."""
    decode_ranks = list(range(prefill_ranks, comm.world))
    is_prefill = comm.rank < prefill_ranks
    own = comms.IndependentSubComm(comm, list(range(prefill_ranks)) if is_prefill else decode_ranks)
    heads = 2 if len(decode_ranks) % 2 == 0 else 1
    sharding = DecodeSharding(tp=heads, cp=len(decode_ranks) // heads)
    context = ContextParallel(own, layout=Zigzag()) if is_prefill else None
    llama = None if is_prefill else ShardedLlama(models[1], sharding, own)
    decoding: list[Decoding] = []
    worked = []
    for batch in batches:
        began = time.monotonic()
        computed = None if context is None else prefill(models[0], context, batch)
        for _ in range(STEPS_PER_MOVE):
            for one in decoding:
                if not one.is_finished:
                    one.step()
        worked.append((began, time.monotonic()))
        # All ranks meet here. The cache is as large as its prompts and answers need.
        cache = reshard(computed, sharding, comm, ranks=decode_ranks, block_size=4, max_length=MAX_LENGTH,
                        num_blocks=len(batch) * MAX_LENGTH // 4, device=models[0].device)  # fmt: skip
        if cache is not None and llama is not None:
            decoding.append(Decoding(llama, cache, batch, count))
    for one in decoding:
        while not one.is_finished:
            one.step()
    return [one.answers for one in decoding], worked


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefill on some ranks, decode on others.")
    parser.add_argument("--prefill", type=int, default=2, help="ranks that prefill (default 2)")
    parser.add_argument("--decode", type=int, default=2, help="ranks that decode, without torchrun (default 2)")
    parser.add_argument("--batches", type=int, default=3, help="batches of two prompts (default 3)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer (default 16)")
    arguments = parser.parse_args()

    device, torchrun = torch.device("cuda" if torch.cuda.is_available() else "cpu"), "RANK" in os.environ
    if torchrun:
        if device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        else:
            device = torch.device("cpu")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    ranks = dist.get_world_size() if torchrun else arguments.prefill + arguments.decode
    if not 0 < arguments.prefill < ranks:
        parser.error(f"--prefill must leave ranks that decode, of {ranks}, got {arguments.prefill}")
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randint(VOCABULARY, (2, 40 + 9 * i), generator=draw).tolist() for i in range(arguments.batches)]
    register_attention()
    models = small_llama(device), small_llama(device)
    models[0].set_attn_implementation("attnmesh")

    def program(comm: Comm) -> tuple[list[Batch], list[tuple[float, float]]]:
        return run_rank(comm, models, batches, arguments.tokens, arguments.prefill)

    comm = comm_from() if torchrun else None
    results = [program(comm)] if comm is not None else run_virtual(ranks, program)
    expected = [
        run_virtual(1, lambda one, b=batch: generate_alone(models[1], one, b, arguments.tokens))[0] for batch in batches
    ]
    for answers, _ in results:
        assert answers in ([], expected), "other tokens than those of a single rank"
    if comm is None or comm.rank == comm.world - 1:
        for batch, answers in zip(batches, results[-1][0], strict=True):
            print(f"prompts of {len(batch[0])} tokens: {answers}")
        print("equal to the tokens of a single rank")
    if comm is not None:
        report_overlap(comm, results[0][1], device)
        dist.destroy_process_group()


def generate_alone(model: LlamaForCausalLM, comm: Comm, prompts: Batch, count: int) -> Batch:
    """The answers of a single rank, one prompt after another."""
    llama = ShardedLlama(model, DecodeSharding(), comm)
    return [generate(llama, [prompt], count)[0][0] for prompt in prompts]


def report_overlap(comm: Comm, worked: list[tuple[float, float]], device: torch.device) -> None:
    """Print for how long the first prefill rank and the last decode rank worked at the same time, on one machine."""
    own = torch.tensor(worked, dtype=torch.float64, device=device)
    first, last = (comm.all_gather(own, [own.shape] * comm.world)[rank].tolist() for rank in (0, comm.world - 1))
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(first, last, strict=True))
    if comm.rank == 0:
        total = sum(end - begin for begin, end in first)
        print(f"prefill took {total:.2f} s; during {both:.2f} s of it the decode ranks decoded earlier batches")


if __name__ == "__main__":
    main()
