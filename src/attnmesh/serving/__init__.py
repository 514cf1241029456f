"""`attnmesh serve`: an HTTP server with OpenAI's API over a `Generator` on all ranks."""
