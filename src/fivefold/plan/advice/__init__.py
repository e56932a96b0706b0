"""What a plan says besides its figures: bottlenecks, remedies, budgets, scaling laws."""
