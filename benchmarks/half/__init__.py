"""What half precision saves, by hand and by jls.autocast: python -m benchmarks.half."""
