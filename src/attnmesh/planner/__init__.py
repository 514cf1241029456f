"""Predicts what each way to divide a model over devices costs."""
