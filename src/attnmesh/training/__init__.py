"""Training over ranks: batches, accelerate, Transformers' Trainer, TRL's SFTTrainer, DDP and FSDP2, verl."""
