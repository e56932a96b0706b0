"""The errors that a user sees. They carry one clear message and never a traceback on the command line."""


class UserError(ValueError):
    """Bad input: a recipe key, a file, a layout. The command line prints the message and exits with 2."""


class CheckFailed(Exception):
    """A check ran and its answer is no (`fivefold verify` beyond tolerance). The command line exits with 1."""
