"""The small stages of an attention block that generates tokens: norms, rotary embedding, heads."""
