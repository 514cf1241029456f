"""State, masks, layouts and ranges of positions: the algebra that everything else is built on."""
