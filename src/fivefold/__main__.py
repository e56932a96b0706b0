"""`python -m fivefold`: the command line."""

from fivefold.cli.main import main

if __name__ == "__main__":
    main()
