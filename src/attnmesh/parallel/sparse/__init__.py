"""The sparse functions over ranks: heads sharded over tp ranks, the sequence over cp ranks."""
