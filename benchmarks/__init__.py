"""What a guarded step costs, compared with optax and peers: python -m benchmarks."""
