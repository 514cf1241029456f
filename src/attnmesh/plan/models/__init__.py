"""Models as plans see them: sizes from config files, by name or anybody's own; parameters, bytes, operations."""
