"""What every rank does under each schedule, round by round, from the plans that executors follow."""
