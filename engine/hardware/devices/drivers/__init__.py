"""What tells of GPUs, a module for each: NVIDIA's NVML, files of AMD's driver, the system, torch.

Each describes and reads the GPUs that it knows; which of them torch can use, and under which
number, is for `engine.hardware.devices.catalog` to say.
"""
