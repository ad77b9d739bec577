"""The one exception that a user is meant to see."""


class FlashtuneError(Exception):
    """A problem the user can act on: ``message`` says what and where, ``hint`` what to do next.

    The command line prints the two as two lines and exits with 2.
    """

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)  # both, or it could not cross to another process
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message
