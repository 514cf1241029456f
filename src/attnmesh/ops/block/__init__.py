"""The stages of an attention block for decoding: configuration and weights, norms, rotary embedding, heads."""
