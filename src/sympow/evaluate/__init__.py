"""What a model has learned, measured on documents it has not seen, and what its state holds."""

from sympow.evaluate.documents import stretches
from sympow.evaluate.passkey import PasskeyPoint, passkey_retrieval
from sympow.evaluate.positions import PositionLosses, loss_by_position
from sympow.evaluate.recall import RecallPoint, Vocabulary, associative_recall

__all__ = [
    "PasskeyPoint",
    "PositionLosses",
    "RecallPoint",
    "Vocabulary",
    "associative_recall",
    "loss_by_position",
    "passkey_retrieval",
    "stretches",
]
