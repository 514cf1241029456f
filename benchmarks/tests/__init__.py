"""benchmarks.tests"""
