"""The command line: one thin file per command. No torch and no pydantic are imported until a command runs."""
