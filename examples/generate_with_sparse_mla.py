"""Generate tokens with a small DeepSeek-V3.2 whose latents and indexer keys are in block caches sharded over ranks.

    python examples/generate_with_sparse_mla.py                           # three virtual ranks in this process
    python examples/generate_with_sparse_mla.py --storage fp8_ds_mla      # in the 656-byte format (here 164 bytes)
    torchrun --nproc-per-node 2 examples/generate_with_sparse_mla.py      # processes: NCCL with one GPU each, or gloo

Every rank runs the model on all tokens and stores the latents of its positions. In each layer the indexer selects the
exact top-k keys of all ranks, and the ranks merge their attention over those that they hold. Attention runs in the
latent space: the up-projection of keys is absorbed into the queries, that of values is applied to the output. At the
end a single rank generates the same prompts, and the tokens are compared; without quantization also with those of
Transformers' own generation. The model has random weights; nothing is downloaded. Needs `pip install "attnmesh[hf]"`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.models.deepseek_v32 import DeepseekV32Config, DeepseekV32ForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    DeepseekV32Attention,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from attnmesh import BlockCache, CacheSpec, comm_from, run_virtual
from attnmesh.comm import Comm
from attnmesh.sparse import SparseDecode

VOCABULARY, MAX_LENGTH, BLOCK_SIZE, CHUNK = 128, 256, 8, 32


def small_model(device: torch.device) -> DeepseekV32ForCausalLM:
    """Two layers, one of them with experts; the same on every rank. A token attends to 12 keys."""
    torch.manual_seed(0)
    config = DeepseekV32Config(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
        topk_group=1, first_k_dense_replace=1, kv_lora_rank=128, q_lora_rank=48, qk_rope_head_dim=16,
        qk_nope_head_dim=24, v_head_dim=20, head_dim=16, index_topk=12, index_head_dim=32,
        index_n_heads=16,  # with few heads many scores are exactly 0, and Transformers does not define which it selects
        max_position_embeddings=MAX_LENGTH, eos_token_id=None,
        initializer_range=0.3,  # larger than usual, so that errors of attention change the tokens
    )  # fmt: skip
    return DeepseekV32ForCausalLM(config).to(device).eval()


class SparseModel:
    """The model with its caches on one rank of a group."""

    def __init__(self, model: DeepseekV32ForCausalLM, comm: Comm, batch: int, storage: str) -> None:
        self.model, self.head, config = model.model, model.lm_head, model.config
        self.decode = SparseDecode(comm, interleave=4)
        self.cache = BlockCache(
            CacheSpec(
                layers=config.num_hidden_layers,
                kv_heads=1,
                head_dim=config.kv_lora_rank + config.qk_rope_head_dim,
                value_dim=config.kv_lora_rank,
                index_dim=config.index_head_dim,
                latent=True,
                storage=storage,
            ),
            num_blocks=batch * MAX_LENGTH // BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            device=self.head.weight.device,
            max_sequences=batch,
            max_length=MAX_LENGTH,
            shard=self.decode.shard,
        )

    @torch.no_grad()
    def step(self, sequences: list, tokens: list[list[int]]) -> Tensor:
        """Append tokens, as many to each sequence, and return the logits [sequences, VOCABULARY] after the last."""
        device = self.head.weight.device
        new = self.cache.append(sequences, tokens)
        end = torch.tensor([sequence.length for sequence in sequences], device=device)
        positions = end[:, None] + torch.arange(-len(tokens[0]), 0, device=device)
        table = self.cache.block_table[[sequence.row for sequence in sequences]]
        x = self.model.embed_tokens(torch.tensor(tokens, device=device))
        angles = self.model.rotary_emb(x, position_ids=positions)
        for number, layer in enumerate(self.model.layers):
            x = x + self._attention(layer.self_attn, layer.input_layernorm(x), angles, number, new, table, end - 1)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.head(self.model.norm(x[:, -1]))

    def _attention(
        self, layer: DeepseekV32Attention, x: Tensor, angles: tuple[Tensor, Tensor], number: int, new: object,
        table: Tensor, cur_pos: Tensor,
    ) -> Tensor:  # fmt: skip
        rank, nope, rope = layer.kv_lora_rank, layer.qk_nope_head_dim, layer.qk_rope_head_dim
        residual = layer.q_a_layernorm(layer.q_a_proj(x))
        q = layer.q_b_proj(residual).unflatten(-1, (-1, nope + rope)).transpose(1, 2)
        latent, k_rope = layer.kv_a_proj_with_mqa(x)[:, None].split([rank, rope], -1)
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q[..., nope:], k_rope, *angles)
        index_q, index_k, weights, scale = self._indexer(layer.indexer, x, residual, angles)
        self.cache.write(number, new, torch.cat([layer.kv_a_layernorm(latent), k_rope], -1), index_k=index_k)

        top = self.decode.indexer_topk(
            index_q,
            self.cache.index_keys(number),
            table,
            weights,
            layer.indexer.index_topk,
            cur_pos=cur_pos,
            scale=scale,
        )
        up = layer.kv_b_proj.weight.view(layer.num_heads, -1, rank)  # [heads, nope + values, latent]
        absorbed = torch.einsum("bhtn,hnr->bthr", q[..., :nope], up[:, :nope])
        out, _ = self.decode.attention(
            torch.cat([absorbed, q_rope.transpose(1, 2)], -1), self.cache.keys(number), table, top,
            scale=layer.scaling, d_v=rank,
        )  # fmt: skip
        return layer.o_proj(torch.einsum("bthr,hvr->bthv", out, up[:, nope:]).flatten(2))

    def _indexer(
        self, indexer: torch.nn.Module, x: Tensor, residual: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """Queries [B, T, heads, D], keys [B, 1, T, D], weights [B, T, heads], and the scale of the scores."""
        rope = indexer.qk_rope_head_dim
        q = indexer.wq_b(residual).unflatten(-1, (-1, indexer.head_dim))
        k = indexer.k_norm(indexer.wk(x))[:, :, None]
        q_rope, k_rope = apply_rotary_pos_emb(q[..., :rope], k[..., :rope], *angles, unsqueeze_dim=2)
        q, k = (torch.cat([rotated, y[..., rope:]], -1) for rotated, y in ((q_rope, q), (k_rope, k)))
        return q, k.transpose(1, 2), indexer.weights_proj(x), indexer.softmax_scale * indexer.n_heads**-0.5


def generate(model: SparseModel, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` tokens after each prompt. Prompts are computed in chunks, one after another; then all decode together."""
    sequences, answers = [], []
    for prompt in prompts:
        sequence = model.cache.allocate(prompt)
        for begin in range(sequence.cached, len(prompt), CHUNK):
            logits = model.step([sequence], [prompt[begin : begin + CHUNK]])
        sequences.append(sequence)
        answers.append([int(logits.argmax())])
    for _ in range(count - 1):
        logits = model.step(sequences, [answer[-1:] for answer in answers])
        for answer, token in zip(answers, logits.argmax(-1).tolist(), strict=True):
            answer.append(token)
    return answers


def by_transformers(model: DeepseekV32ForCausalLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The same by Transformers' generation, one prompt at a time."""
    device = model.lm_head.weight.device
    return [
        model.generate(torch.tensor([prompt], device=device), max_new_tokens=count, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in prompts
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate tokens with sparse MLA over block caches on several ranks.")
    parser.add_argument("--ranks", type=int, default=3, help="number of virtual ranks, without torchrun (default 3)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per answer (default 16)")
    parser.add_argument(
        "--storage", choices=("fp32", "fp8_ds_mla"), default="fp32", help="of the caches (default fp32)"
    )
    arguments = parser.parse_args()

    device, torchrun = torch.device("cuda" if torch.cuda.is_available() else "cpu"), "RANK" in os.environ
    if torchrun:
        local = int(os.environ["LOCAL_RANK"])
        if device.type == "cuda" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
            torch.cuda.set_device(local)
        else:
            device = torch.device("cpu")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    generator = torch.Generator().manual_seed(1)
    prefix = torch.randint(VOCABULARY, (24,), generator=generator).tolist()
    prompts = [prefix + torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (30, 9, 17)]
    model = small_model(device)

    def rank(comm: Comm) -> list[list[int]]:
        return generate(SparseModel(model, comm, len(prompts), arguments.storage), prompts, arguments.tokens)

    comm = comm_from(None) if torchrun else None
    answers = run_virtual(arguments.ranks, rank) if comm is None else [rank(comm)]
    alone = run_virtual(1, rank)[0]
    same = all(answer == alone for answer in answers)
    if comm is None or comm.rank == 0:
        ranks = arguments.ranks if comm is None else comm.world
        for prompt, answer in zip(prompts, answers[0], strict=True):
            print(f"{len(prompt)} prompt tokens: {' '.join(map(str, answer))}")
        print(f"{ranks} ranks, {arguments.storage}: {'equal to' if same else 'NOT'} the tokens of a single rank")
        if arguments.storage == "fp32":
            theirs = by_transformers(model, prompts, arguments.tokens)
            same &= theirs == alone
            print(f"{'equal to' if theirs == alone else 'NOT'} the tokens of Transformers")
    if torchrun:
        dist.destroy_process_group()
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
