"""The sparse family over ranks: heads spread over some, the sequence over others."""
