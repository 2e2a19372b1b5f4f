"""Evaluation of trained models: loss on held-out documents by position, probes of the state, statistics of heads."""

from sympow.evaluate.held_out_loss import PositionLosses, document_sequences, loss_by_position
from sympow.evaluate.probes import PasskeyPoint, RecallPoint, Vocabulary, associative_recall, passkey_retrieval

__all__ = [
    "PasskeyPoint",
    "PositionLosses",
    "RecallPoint",
    "Vocabulary",
    "associative_recall",
    "document_sequences",
    "loss_by_position",
    "passkey_retrieval",
]
