"""A machine that is not there: the files of `/proc` and `/sys` that tell of it."""

from pathlib import Path

KIB_OF_100_GB = 10**11 // 1024


def machine_files(root: Path, files: dict[str, str]) -> Path:
    """A root whose machine has 100 GB of free memory and one disk; `files` go on top."""
    usual = {
        "proc/meminfo": f"MemTotal: {2 * KIB_OF_100_GB} kB\nMemAvailable: {KIB_OF_100_GB} kB\n",
        "proc/self/status": "VmRSS:\t 1000 kB\n",
        "proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n",
    }
    for path, text in (usual | files).items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
    return root
