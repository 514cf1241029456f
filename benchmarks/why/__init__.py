"""The figures of docs/why.md and the data that they need besides docs/results and docs/data/scaling.json."""
