"""The result of comparing numbers with what the requested noise makes of them."""

from dataclasses import dataclass, field


@dataclass
class Comparison:
    """Result of a comparison.

    `numbers` elements were recomputed. `largest_deviation` is the largest difference as a multiple of the difference
    that rounding explains: above 1 it contradicts the request. `contradictions` counts what was found, in words.
    """

    numbers: int = 0
    largest_deviation: float = 0.0
    contradictions: dict[str, int] = field(default_factory=dict)

    def note(self, contradiction: str) -> None:
        """Count one contradiction."""
        self.contradictions[contradiction] = self.contradictions.get(contradiction, 0) + 1
