"""Linux without what macOS lacks, for interpreters that have this folder on PYTHONPATH."""

import ctypes.util  # noqa: F401 - Debian's has no part for macOS
import os
import signal
import sys
import sysconfig
import types

sysconfig.get_config_vars()  # from a file with the name of the platform
sys.platform = "darwin"
sys.modules["resource"] = sys.modules["triton"] = None
sys.modules["_scproxy"] = types.ModuleType("_scproxy")  # which macOS has
vars(sys.modules["_scproxy"]).update(_get_proxies=dict, _get_proxy_settings=dict)
for module, names in {
    os: ("fork", "forkpty", "posix_fallocate", "posix_fadvise", "sched_getaffinity", "sched_setaffinity"),
    signal: ("SIGRTMIN", "sigwaitinfo", "sigtimedwait"),
}.items():
    for name in names:
        delattr(module, name)

whole_stat = os.stat


def stat(path: object, *arguments: object, **options: object) -> os.stat_result:
    if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(("/dev/shm", "/proc", "/sys")):
        raise FileNotFoundError(2, "there is no such folder on macOS", path)
    return whole_stat(path, *arguments, **options)


os.stat = stat
