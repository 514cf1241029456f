"""What each rank computes and sends under each schedule, as plain data that executors follow."""
