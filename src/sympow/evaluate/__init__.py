"""What a model has learned, measured on documents it has not seen."""

from sympow.evaluate.positions import PositionLosses, loss_by_position

__all__ = ["PositionLosses", "loss_by_position"]
