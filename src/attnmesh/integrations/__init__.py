"""Attention of Transformers models and of torch's `scaled_dot_product_attention` over ranks."""
