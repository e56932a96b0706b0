"""The command line: one thin file a command. No torch, no pydantic until a command runs."""
