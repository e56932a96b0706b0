"""What a layout costs before it is run: memory, time and communication predicted, layouts searched. No torch."""
