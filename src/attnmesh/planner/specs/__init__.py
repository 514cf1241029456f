"""One description per schedule: its rounds, its peak memory and its tiles, from the plan that executors follow."""
