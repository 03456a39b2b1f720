"""Asks the service at fixed times, however long it takes, so that a slow answer makes the next ones wait: socket, number of requests, milliseconds from one
to the next.

Prints one line of JSON: how long each took, from when it was due to its answer, in milliseconds; how long service and client waited for a processor, by the
kernel's count (/proc/PID/schedstat).
"""

import json
import socket
import struct
import sys
import time

path, count, every_ms = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

connection = socket.socket(socket.AF_UNIX)
connection.connect(path)
# struct ucred of who listens: pid, uid, gid.
service, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))


def waited_ms():
    """Ready to run, and not running."""
    total = 0
    for pid in (service, "self"):
        with open(f"/proc/{pid}/schedstat") as file:
            total += int(file.read().split()[1])
    return total / 1e6


asked, took = 0, []
began = time.monotonic()
before = waited_ms()
while len(took) < count:
    due = began + asked * every_ms / 1000
    wait = max(0.0, due - time.monotonic()) if asked < count else None
    connection.settimeout(wait or None)
    if wait == 0.0:
        connection.send(b"?")
        asked += 1
        continue
    try:
        answers = len(connection.recv(64))
    except TimeoutError:
        continue
    now = time.monotonic()
    for _ in range(answers):
        took.append((now - began) * 1000 - len(took) * every_ms)
print(json.dumps({"tookMs": [round(ms, 3) for ms in took], "waitedMs": round(waited_ms() - before, 3)}))
