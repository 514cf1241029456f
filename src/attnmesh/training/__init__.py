"""Training over ranks: batches, accelerate, Transformers' Trainer, TRL's trainers, DDP and FSDP2, verl."""
