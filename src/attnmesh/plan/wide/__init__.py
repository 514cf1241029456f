"""The plans of thousands of ranks, by arithmetic on whole arrays: the same figures as patch by patch, in seconds."""
