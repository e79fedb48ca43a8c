# SPDX-License-Identifier: Apache-2.0
"""What the machine of the kit has of what lockstep needs: each a line, and the rest goes on."""
import ctypes
import os
import platform
import socket
import struct
import subprocess
import sys


missing = []


def fact(name, ask):
    try:
        print(f"{name}: {ask()}")
    except Exception as error:
        print(f"{name}: {error!r}")
        missing.append(name)


def pidfd_getfd():
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(os.getpid())
    fd = libc.syscall(438, pidfd, 1, 0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(fd)
    return "works"


def memory_of_another_process():
    fd = os.memfd_create("kit")
    os.ftruncate(fd, 4096)
    return f"memfd {fd}, /dev/shm {os.statvfs('/dev/shm').f_bavail * os.statvfs('/dev/shm').f_frsize >> 20} MiB free"


def peer_credentials():
    server = socket.socket(socket.AF_UNIX)
    server.bind(f"\0gpu_kit.{os.getpid()}")
    server.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect(server.getsockname())
    accepted, _ = server.accept()
    pid, uid, gid = struct.unpack("3i", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return f"pid {'right' if pid == os.getpid() else 'WRONG'}, uid {uid}"


def gpus():
    import torch

    names = [f"{torch.cuda.get_device_name(i)}, {torch.cuda.mem_get_info(i)[1] >> 30} GiB" for i in range(torch.cuda.device_count())]
    return f"torch {torch.__version__}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}: {'; '.join(names)}"


fact("system", lambda: f"{platform.platform()}, {platform.libc_ver()}, Python {sys.version.split()[0]}, {os.cpu_count()} cores")
fact("processor", lambda: next(line for line in open("/proc/cpuinfo") if line.startswith("model name")).split(":")[1].strip())
fact("vectors", lambda: " ".join(word for word in next(line for line in open("/proc/cpuinfo") if line.startswith("flags")).split()
                                 if word in ("avx2", "avx512f", "avx512_bf16", "fma", "bmi2")))
fact("pidfd_getfd", pidfd_getfd)
fact("memory", memory_of_another_process)
fact("peer credentials", peer_credentials)
fact("driver", lambda: open("/proc/driver/nvidia/version").readline().strip())
fact("nvidia-smi", lambda: subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,compute_mode,mig.mode.current",
                                           "--format=csv,noheader"], capture_output=True, text=True).stdout.strip())
fact("compilers", lambda: subprocess.run("g++ --version | head -1; which nvcc compute-sanitizer cmake ninja", shell=True,
                                         capture_output=True, text=True).stdout.replace("\n", " "))
fact("gpus", gpus)
print("missing: " + ", ".join(missing) if missing else "all is there")
sys.exit(len(missing) > 0)
