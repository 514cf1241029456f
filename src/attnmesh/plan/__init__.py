"""The brain: what each rank would do and what it costs, as plain data. Pure: nothing here starts a process."""
