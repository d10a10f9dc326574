"""What a guarded step costs, beside plain optax and the peers: python -m benchmarks."""
