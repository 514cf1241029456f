"""The figures of docs/why.md and the data that they need besides docs/benchmarks.md and docs/data/scaling.json."""
