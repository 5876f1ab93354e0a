"""What is compiled for the benchmarks, and how."""
