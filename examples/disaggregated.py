"""Some ranks prefill prompts, others decode their answers, and KV caches move between them while both work.

    python examples/disaggregated.py                              # 2 + 2 virtual ranks in this process
    python examples/disaggregated.py --prefill 3 --decode 2       # any numbers of ranks
    torchrun --nproc-per-node 4 examples/disaggregated.py         # processes: NCCL with one GPU each, or gloo

The prefill ranks compute a batch of prompts by context parallelism, each a zigzag part of every prompt. `reshard` moves
its keys and values into the cache of the decode ranks, which shard it by heads or positions: the prompts join those
that are decoded there. While these go on, the prefill ranks compute the next batch: both meet only to move one. A batch
waits while the cache has no room for it. The last token of a prompt is left to the decode ranks, so that nothing but
keys and values moves. At the end a single rank generates the same prompts, and the tokens are compared.

The model is the Llama of `generate_over_ranks.py`. Needs `pip install "attnmesh[hf]"`.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from transformers import DynamicCache, LlamaForCausalLM

import attnmesh.comm as comms
from attnmesh import ContextParallel, DecodeSharding, Zigzag, comm_from, register_attention, run_virtual, shard_inputs
from attnmesh.comm import Comm
from attnmesh.decode import CacheFull, PrefillKV, reshard
from generate_over_ranks import VOCABULARY, ShardedLlama, generate, small_llama

Batch = list[list[int]]
STEPS_PER_MOVE = 5  # decode steps between two moves
SEQUENCES = 5  # that are decoded together: two batches, so that the third has to wait


@torch.no_grad()
def prefill(model: LlamaForCausalLM, ranks: ContextParallel, prompts: Batch) -> PrefillKV:
    """The keys and values of this rank's part of prompts of one length, without their last tokens."""
    ids = torch.tensor([prompt[:-1] for prompt in prompts], device=model.device)
    cache = DynamicCache(config=model.config)
    model.model(**{**shard_inputs(ranks, ids), "past_key_values": cache, "use_cache": True})
    keys, values = [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]
    return PrefillKV(keys, values, ranks.layout, ids.shape[1], ranks.rank, ranks.world, ids.tolist())


class Decoding:
    """The answers that are decoded together, in one cache."""

    def __init__(self, llama: ShardedLlama, count: int) -> None:
        self._llama, self._count, self.cache = llama, count, llama.make_cache(batch=SEQUENCES)
        self._running: list[tuple] = []  # a sequence in the cache, its last token, and its answer

    def join(self, sequences: dict, prompts: Batch) -> Batch:
        """Decode the answers to prompts whose other tokens are cached; they grow with every step."""
        answers: Batch = [[] for _ in prompts]
        self._running += [(sequences[row], prompt[-1:], answers[row]) for row, prompt in enumerate(prompts)]
        return answers

    def step(self) -> None:
        """The next token of every answer; those that are finished make room."""
        if not self._running:
            return
        sequences, last, answers = map(list, zip(*self._running, strict=True))
        best = self._llama.step(self.cache, sequences, last).argmax(-1).tolist()
        for sequence, answer in zip(sequences, answers, strict=True):
            answer.append(best[sequence.row])
            if len(answer) == self._count:
                self.cache.free(sequence)
        self._running = [(one, answer[-1:], answer) for one, _, answer in self._running if len(answer) < self._count]

    def finish(self) -> None:
        """Decode all answers to their ends."""
        while self._running:
            self.step()


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
    decoding = None if is_prefill else Decoding(ShardedLlama(models[1], sharding, own), count)
    found, worked = [], []
    for batch in batches:
        began = time.monotonic()
        computed = None if context is None else prefill(models[0], context, batch)
        while True:
            for _ in range(STEPS_PER_MOVE if decoding is not None else 0):
                decoding.step()
            worked.append((began, time.monotonic()))
            try:  # all ranks meet here
                joined = reshard(computed, sharding, comm, ranks=decode_ranks, device=models[0].device,
                                 into=None if decoding is None else decoding.cache)  # fmt: skip
                break
            except CacheFull:  # raised on all ranks: decode first, until answers have made room
                began = time.monotonic()
        if decoding is not None:
            found.append(decoding.join(joined, batch))
    if decoding is not None:
        decoding.finish()
    return found, worked


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
