"""`fivefold play`: a page on this machine that starts, shows and compares runs. What it runs are the commands."""
