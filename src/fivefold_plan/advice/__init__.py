"""What a plan says besides its figures: every term, bottlenecks, remedies, budgets, scaling laws."""
