"""FLOPs of a training step by formula."""

from dataclasses import dataclass

from mtptrain.heads.packing import Packing


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of the weight matmuls and attention in forward, loss and backward. Recomputation does not count."""

    per_token: int
    """For each of N tokens: its input projection, and its key and value at depth 0."""
    per_row: int
    """For each of M rows: all other weights at T depths, including the draft logits, and the teacher's logits."""
    per_pair: int
    """For each pair of a row and a token that it attends to, at all depths."""
    per_document_pair: int = 0
    """For each pair of a token and a token of its document up to itself, in heads where all tokens attend."""

    def of(self, packing: Packing) -> float:
        """Returns the FLOPs of a step over a packed batch."""
        num_tokens, num_rows = len(packing.positions), len(packing.rows)
        attention = self.per_pair * packing.num_pairs + self.per_document_pair * packing.num_document_pairs
        return self.per_token * num_tokens + self.per_row * num_rows + attention
