"""Launches by Triton's own launcher for NVIDIA, on a driver in C that records its arguments.

A module for a separate process: it prints the library's arguments, and the expected ones.
"""

import ctypes
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from engine.backends.gpu.launch.kernel_launch import launch
from tests.engine.backends.gpu.offline import STREAM, on_fake_gpu
from tests.engine.backends.gpu.offline_cases import of_all_kinds
from tests.helpers.fake_cuda import FakeCuda

SOURCE = r"""
#include <stdint.h>
#include <string.h>
int n_wanted; unsigned seen[7]; uint64_t seen_stream, seen_function; unsigned char given[32][8];
int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) {
  memcpy(seen, config, sizeof seen);
  memcpy(&seen_stream, (const char *)config + 32, 8);
  seen_function = (uint64_t)function;
  for (int n = 0; n < n_wanted; n++) memcpy(given[n], params[n], 8);
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)77; return 0; }
int cuModuleLoadData(void **module, const void *code) { *module = (void *)5; return 0; }
int cuModuleGetFunction(void **f, void *module, const char *name) { *f = (void *)99; return 0; }
int cuFuncGetAttribute(int *value, int which, void *f) { *value = which ? 0 : 1024; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = 1 << 17; return 0; }
int cuPointerGetAttribute(void *to, int which, uint64_t address) { return 1; }
int cuPointerGetAttributes(unsigned n, void *which, void **to, uint64_t address) { return 1; }
int cuDevicePrimaryCtxRetain(void **context, int device) { return 1; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuFuncSetAttribute(void *f, int which, int value) { return 0; }
int cuFuncSetCacheConfig(void *f, int config) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "refused"; return 0; }
int cuCtxSetLimit(int which, size_t value) { return 0; }
int cuCtxGetLimit(size_t *value, int which) { return 0; }
int cuOccupancyMaxActiveClusters(int *n, void *f, void *config) { return 1; }
int cuTensorMapEncodeTiled(void) { return 1; }
int cuTensorMapEncodeIm2col(void) { return 1; }
"""
"""Driver that records launches; it does not know the device of an address."""


class OneCard(CudaDriver):
    """Triton's driver as on a machine with one card."""

    def __init__(self) -> None:
        super().__init__()
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: STREAM

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def built(folder: str) -> ctypes.CDLL:
    """Compile the driver library and load it under the name that Triton's launcher opens."""
    (Path(folder) / "cuda.c").write_text(SOURCE)
    subprocess.run(
        [os.environ.get("CC") or "gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "cuda.c",
         "-o", "libcuda.so.1"],
        cwd=folder, check=True,
    )  # fmt: skip
    (Path(folder) / "libcuda.so").symlink_to("libcuda.so.1")  # for Triton's linker
    knobs.nvidia.libcuda_path = folder
    return ctypes.CDLL(str(Path(folder) / "libcuda.so.1"), ctypes.RTLD_GLOBAL)


def main() -> None:
    x, y, far = torch.zeros(64, dtype=torch.float16), torch.zeros(64, dtype=torch.int8), 1 << 40
    found = []
    with TemporaryDirectory() as folder, on_fake_gpu(GPUTarget("cuda", 90, 32), FakeCuda()):
        library = built(folder)
        driver.set_active(OneCard())
        ctypes.c_int.in_dll(library, "n_wanted").value = 8
        for a, b, f, flag in ((x, y[1:], 2.5, True), (x[8:], y[3:], -0.125, False)):
            launch(of_all_kinds, (3, 2), a, b, 48, -3, 1, far, f, flag, num_warps=2, SIZE=16)
            given = bytes((ctypes.c_ubyte * 256).in_dll(library, "given"))
            sizes = (8, 8, 4, 4, 8, 4, 1)  # `one` is compiled in
            values = b"".join(given[8 * n : 8 * n + size] for n, size in enumerate(sizes))
            wanted = struct.pack("<QQiiqf?", a.data_ptr(), b.data_ptr(), 48, -3, far, f, flag)
            found.append([
                list((ctypes.c_uint * 7).in_dll(library, "seen"))[:4],
                ctypes.c_uint64.in_dll(library, "seen_stream").value,
                ctypes.c_uint64.in_dll(library, "seen_function").value,
                values.hex(), wanted.hex(),
            ])  # fmt: skip
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
