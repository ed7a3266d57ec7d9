"""What tests share: tiny models, planted data, chat templates, child processes."""

import os
import shutil

# Before torch and huggingface_hub are imported, here or in a process that a test starts. The last bits depend on the
# number of threads; and TRL's trainers report their use to Hugging Face by default.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
if shutil.which("nvidia-smi") is None:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton, too, reads it when it is imported: its kernels then run on a CPU
