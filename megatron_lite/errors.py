"""What a user can be told, and the exit code that goes with it.

Every error that a user can cause or repair is raised as one of these types with a
message that says what, where, which value and what is legal. The entry points print
the message once, without a traceback, and leave with `exit_code`. Any other exception
is a defect of ours and keeps its traceback.
"""


class UserError(Exception):
    """Configuration or input refused: flag, layout, missing file, unusable tokenizer."""

    exit_code = 2


class DamagedError(UserError):
    """Data or checkpoint damaged beyond fallback, token out of range, no space left."""

    exit_code = 3


class RunStopped(UserError):
    """Stopped on a signal after saving; starting the same command again continues."""

    exit_code = 75
