"""Names of generation that fewer programs need; `Generator`, `generate` and `Sampling` are at the top level."""

from attnmesh.generation.batching import Callbacks
from attnmesh.generation.moving import load_requests, move_requests, save_requests
from attnmesh.generation.requests import GenerationStats, Request, Token

__all__ = ["Callbacks", "GenerationStats", "Request", "Token", "load_requests", "move_requests", "save_requests"]
