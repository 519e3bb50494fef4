"""What errors of other libraries say, for sentences of ours. Imports nothing heavy: the command needs it early."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line; of a wrapped one, what the inner says."""
    cause = error.__cause__ or error
    return next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
