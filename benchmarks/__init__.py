"""What a guarded step costs, compared with optax and peers: python -m benchmarks."""

import os
import sys

# To compile for chips that are not here. The last six keep libtpu from looking for its
# chips, and quiet.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
# Here, since it is read when jax and libtpu are imported.
if any(argument.startswith("--target") for argument in sys.argv[1:]):
    os.environ.update(ENVIRONMENT)
