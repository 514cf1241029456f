"""Token generation over many ranks: the KV cache is spread by heads, sequences and positions."""
