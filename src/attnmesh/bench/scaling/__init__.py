"""Studies by simulation: what happens to schedules and shardings at more ranks than anybody has at hand."""
