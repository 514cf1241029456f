"""Names of generation that fewer programs need; `Generator`, `generate` and `Sampling` are at the top level."""

from attnmesh.generation.batching import Callbacks
from attnmesh.generation.moving import load_requests, move_requests, save_requests
from attnmesh.generation.requests import Request, Token
from attnmesh.generation.stats import GenerationStats

__all__ = ["Callbacks", "GenerationStats", "Request", "Token", "load_requests", "move_requests", "save_requests"]
