"""The errors a person can act on; everything else is a bug and keeps its traceback."""


class ReapError(Exception):
    """Something the user can put right. `hint` says how, in one line."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class CheckpointError(ReapError):
    """A checkpoint is incomplete, damaged or in a format that reap does not know."""


class ArtifactError(ReapError):
    """A reap file is missing, damaged, of another kind or of a newer version."""


class BudgetError(ReapError):
    """No plan fits the budget."""


class CalibrationError(ReapError):
    """The calibration text or what was observed on it cannot be used."""
