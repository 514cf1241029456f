"""What a rank has sent: the figures that plans predict and benchmarks report."""

from dataclasses import dataclass, field


@dataclass
class Traffic:
    """Messages and payload bytes sent by one rank, in total and per verb.

    Counted is what the verb means, not how a transport carries it: padding, staging copies and the
    algorithm behind a collective do not show. `all_gather` sends its part to every other rank, `all_reduce`
    twice all but its own share.
    """

    messages: int = 0
    bytes: int = 0
    verbs: dict[str, tuple[int, int]] = field(default_factory=dict)

    def add(self, verb: str, messages: int, nbytes: int) -> None:
        """Count `messages` messages of `nbytes` bytes together."""
        self.messages += messages
        self.bytes += nbytes
        sent = self.verbs.get(verb, (0, 0))
        self.verbs[verb] = (sent[0] + messages, sent[1] + nbytes)

    def reset(self) -> None:
        """Start again from zero."""
        self.messages = self.bytes = 0
        self.verbs.clear()
