"""The errors a person can meet.

In: nothing. Out: exception classes. The command line turns every `GptossError` into one message and an exit code; anything else is a
bug of ours and keeps its traceback.
"""


class GptossError(Exception):
    """Base of all expected failures. `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(GptossError):
    """Something the user set, wrote or pointed at is wrong; a change on their side cures it."""

    exit_code = 2


class ConfigError(UserError):
    """A configuration value breaks a rule. The message says what is set, where, which rule, and what would work."""


class DataError(UserError):
    """A prompt or data file cannot be used. The message names the file and, where there is one, the line."""


class CheckpointError(UserError):
    """A checkpoint is missing, torn, of another architecture, or cannot be written."""


class MachineError(UserError):
    """The machine lacks something: a free port, a library, disk space, a device."""


class RunFailed(GptossError):
    """A run that had started cannot go on."""


class ParityError(RunFailed):
    """Trainer and rollout engine disagree on the same tokens; training would be wrong."""


class EngineFailed(RunFailed):
    """A rollout engine died or refused an update, and could not be brought back."""


class StoppedEarly(RunFailed):
    """Somebody asked the run to stop soon (SIGUSR1); it has saved and can go on. Not a failure: try again."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class TrainerFailed(RunFailed):
    """A trainer rank died, or the optimizer met values that are not finite too often."""


class DeadlineExpired(RunFailed):
    """A phase ran past its deadline. The message names the phase, who is missing and the last finished item."""
