"""Programs on a cluster: ports and who shares them, event by event or a round at a time."""
