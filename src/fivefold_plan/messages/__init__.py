"""What ranks send, and what a message costs."""
