"""Where the files that ship with reap lie, in a wheel and in a checkout."""

from pathlib import Path

_PACKAGE = Path(__file__).parent

EMBEDDED = "embedded"
"""What to name instead of a model's directory."""


def data_directory(name: str) -> Path:
    """`calibration` or `recipes`: inside an installed wheel, else at the top of the repository."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parent / name


def embedded_model() -> Path:
    """The K3-architecture model that ships with reap."""
    return _PACKAGE / "embedded" / "tiny-k3"


def model_path(model: str) -> Path:
    """The directory that `model` names, if it names one; "embedded" is the model inside reap.

    Raises RuntimeError for ~ of a user that does not exist.
    """
    path = Path(model).expanduser()
    return embedded_model() if model == EMBEDDED and not path.exists() else path
