"""Calibration: a model and text in, saliency out."""

from reap.calibrate.calibrate import CalibrationSettings, calibrate

__all__ = ["CalibrationSettings", "calibrate"]
